"""Programs that the machine lacks: by apt where there is one, in words elsewhere. A script stands in for apt-get."""

from __future__ import annotations

from pathlib import Path

import pytest

from crosscloud_lab import packages
from crosscloud_lab.errors import LabError, PreflightError
from crosscloud_lab.packages import CNI_PLUGINS, ensure_packages
from crosscloud_lab.progress import SilentProgress

TOOLS = {"buildah": "buildah", "ctr": "containerd", "containerd": "containerd"}
MISSING = "buildah: install what Debian calls buildah"
# Knows no package before its first `update`; notes what it is asked, and whether services may start meanwhile.
APT_GET = """\
#!/bin/sh
echo "$* $(test -x {policy} && {policy}; echo $?)" >> {folder}/asked
case "$*" in
  *update) echo > {folder}/updated ;;
  *) test -e {folder}/updated || {{ echo "E: Unable to locate package" >&2; exit 100; }}
     for name in {brought}; do echo > {folder}/bin/$name; chmod 755 {folder}/bin/$name; done ;;
esac
"""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose `bin` is the whole path, with two programs of the shell."""
    (tmp_path / "bin").mkdir()
    for program in ("sh", "chmod"):
        (tmp_path / "bin" / program).symlink_to(f"/bin/{program}")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(packages, "SYSTEM_PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(packages, "CNI_FOLDERS", (tmp_path / "cni",))
    monkeypatch.setattr(packages, "_POLICY", tmp_path / "policy-rc.d")
    return tmp_path


def with_apt(machine: Path, brought: str = "", script: str = APT_GET) -> None:
    apt = machine / "bin" / "apt-get"
    apt.write_text(script.format(folder=machine, policy=machine / "policy-rc.d", brought=brought))
    apt.chmod(0o755)


def asked(machine: Path) -> list[tuple[str, str]]:
    """What apt-get was told to do, and what the policy for services answered then."""
    lines = (machine / "asked").read_text().splitlines()
    return [(line.partition("600 ")[2].rpartition(" ")[0] or line.split()[1], line.split()[-1]) for line in lines]


def test_without_apt_each_missing_package_is_a_sentence(machine: Path) -> None:
    with pytest.raises(PreflightError, match="no apt to install them") as caught:
        ensure_packages(TOOLS, SilentProgress())
    assert caught.value.findings == (MISSING, "ctr, containerd: install what Debian calls containerd")


def test_missing_network_plugins_and_a_busybox_that_needs_a_library_are_told_too(machine: Path) -> None:
    for name in packages.CLUSTER_TOOLS:
        (machine / "bin" / name).symlink_to("/bin/sh")
    with pytest.raises(PreflightError) as caught:
        ensure_packages(packages.CLUSTER_TOOLS, SilentProgress())
    assert caught.value.findings == (
        "busybox: install what Debian calls busybox-static",
        "the CNI plugins: install what Debian calls containernetworking-plugins",
    )
    (machine / "cni").mkdir()
    for plugin in CNI_PLUGINS:
        (machine / "cni" / plugin).touch()
    with pytest.raises(PreflightError) as caught:
        ensure_packages(packages.CLUSTER_TOOLS, SilentProgress())
    assert caught.value.findings == ("busybox: install what Debian calls busybox-static",)


def test_an_old_package_list_is_renewed_and_no_service_starts_meanwhile(machine: Path) -> None:
    with_apt(machine, "buildah ctr containerd")
    ensure_packages(TOOLS, SilentProgress())
    install = "install buildah containerd"
    assert asked(machine) == [(install, "101"), ("update", "101"), (install, "101")]
    assert not (machine / "policy-rc.d").exists()
    ensure_packages(TOOLS, SilentProgress())
    assert len(asked(machine)) == 3, "nothing is missing any more"


def test_the_machines_own_policy_for_services_is_left_alone_and_ours_of_a_killed_run_is_not(machine: Path) -> None:
    with_apt(machine, "buildah ctr")
    policy = machine / "policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 7\n")
    policy.chmod(0o755)
    with pytest.raises(PreflightError, match="programs are still missing") as caught:
        ensure_packages(TOOLS, SilentProgress())
    assert caught.value.findings == ("ctr, containerd: install what Debian calls containerd",)
    assert {answer for _, answer in asked(machine)} == {"7"}
    assert policy.read_text() == "#!/bin/sh\nexit 7\n"
    policy.write_text(packages._POLICY_TEXT)
    with pytest.raises(PreflightError):
        ensure_packages(TOOLS, SilentProgress())
    assert not policy.exists()


def test_what_apt_says_when_it_fails_is_told_and_services_may_start_again(machine: Path) -> None:
    with_apt(machine, script="#!/bin/sh\necho 'E: no network' >&2\nexit 100\n")
    with pytest.raises(LabError, match=r"apt-get .* failed with exit status 100:\nE: no network"):
        ensure_packages(TOOLS, SilentProgress())
    assert not (machine / "policy-rc.d").exists()
