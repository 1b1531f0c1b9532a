"""`crosscloud`, also `kubectl crosscloud`: members, results and the state of jobs."""

from __future__ import annotations

import click

from crosscloud_operator.cli.common import Commands, Hub, checked_name
from crosscloud_operator.cli.fetch import fetch
from crosscloud_operator.cli.init import init
from crosscloud_operator.cli.member import member
from crosscloud_operator.cli.status import status


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="crosscloud-operator", prog_name="crosscloud")
@click.option(
    "--kubeconfig",
    "--hub-kubeconfig",
    metavar="FILE",
    help="The hub's kubeconfig [default: KUBECONFIG, ~/.kube/config]",
)
@click.option(
    "--context", "--hub-context", "hub_context", metavar="NAME", help="The hub's context [default: the current one]"
)
@click.option(
    "--operator-namespace",
    metavar="NAME",
    default="crosscloud-system",
    show_default=True,
    callback=checked_name,
    help="Where the operator runs on the hub.",
)
@click.pass_context
def main(context: click.Context, kubeconfig: str | None, hub_context: str | None, operator_namespace: str) -> None:
    """Train one model over several Kubernetes clusters.

    The hub is the cluster that your KUBECONFIG shows, unless --kubeconfig or --context say otherwise (or, behind a
    command, --hub-kubeconfig and --hub-context).
    """
    context.obj = Hub(kubeconfig, hub_context, operator_namespace)


main.add_command(init)
main.add_command(member)
main.add_command(fetch)
main.add_command(status)


if __name__ == "__main__":
    main()
