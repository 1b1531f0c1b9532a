# Three images: `operator`, `trainer` and `gateway`, by `--target`.
#
#   docker build --target operator -t crosscloud-operator .
#   buildah bud --isolation chroot --build-arg BASE=... --target trainer -t crosscloud-trainer .
#
# BASE is any Debian with Python 3.11, its venv module and CA certificates. Versions are those of
# requirements/constraints.txt. What Python packages need lies in a layer below our own sources, so that a change of ours
# doesn't fetch them again.
#
# What a machine needs to reach a package index goes into no layer: `--secret id=pip,src=/etc/pip.conf`, and
# `--secret id=ca,src=FILE` for certificates. A folder of wheels that the index doesn't have comes with
# `--build-context local-wheels=FOLDER --build-arg PIP_FIND_LINKS=/mnt/wheels`.
ARG BASE=python:3.11-slim-bookworm

FROM scratch AS local-wheels

FROM ${BASE} AS base
RUN groupadd --gid 65532 crosscloud \
 && useradd --uid 65532 --gid 65532 --home-dir /tmp --no-create-home --shell /usr/sbin/nologin crosscloud

FROM base AS python
ENV PATH=/opt/crosscloud/bin:$PATH \
    PIP_CONSTRAINT=/opt/crosscloud/constraints.txt \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_USE_PEP517=1 \
    PYTHONUNBUFFERED=1
RUN python3 -m venv /opt/crosscloud
COPY requirements/constraints.txt /opt/crosscloud/
WORKDIR /build

FROM python AS wheels
ARG PIP_FIND_LINKS
COPY trainer trainer
COPY operator operator
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=bind,from=local-wheels,target=/mnt/wheels \
    pip wheel --no-deps --wheel-dir /wheels ./trainer ./operator

# The dependencies come with packages that are still empty; the wheels of the sources follow in a layer of their own.
FROM python AS operator
ARG PIP_FIND_LINKS
COPY trainer/pyproject.toml trainer/
COPY operator/pyproject.toml operator/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=bind,from=local-wheels,target=/mnt/wheels \
    mkdir trainer/src operator/src && pip install ./trainer ./operator && rm -r trainer operator
COPY --from=wheels /wheels wheels
RUN pip install --no-deps --no-index --force-reinstall wheels/*.whl
WORKDIR /
USER 65532:65532
ENTRYPOINT ["crosscloud-operator"]

FROM python AS trainer
ARG PIP_FIND_LINKS
COPY trainer/pyproject.toml trainer/
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=secret,id=ca,target=/etc/ssl/certs/ca-certificates.crt \
    --mount=type=bind,from=local-wheels,target=/mnt/wheels \
    mkdir trainer/src && pip install './trainer[torch]' && rm -r trainer
COPY --from=wheels /wheels wheels
RUN pip install --no-deps --no-index --force-reinstall wheels/crosscloud_trainer-*.whl
WORKDIR /
USER 65532:65532
ENTRYPOINT ["crosscloud-trainer"]

FROM base AS gateway
RUN apt-get update \
 && apt-get install --yes --no-install-recommends 'haproxy=2.6.*' \
 && rm -rf /var/lib/apt/lists/*
USER 65532:65532
ENTRYPOINT ["haproxy"]
CMD ["-f", "/etc/crosscloud/gateway/haproxy.cfg"]
