# syntax=docker/dockerfile:1
# Echelon and its examples:  docker build --tag echelon .
# For GPUs:                  docker build --tag echelon --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .
# With your own code:        FROM echelon, then COPY it to /app, where configs find it.

FROM python:3.11-slim AS build
# Where torch comes from: its wheels for CPUs need a tenth of the room. The version stays that of constraints.txt.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /src
# What changes seldom comes first: a layer is built again only if what it copies has changed.
COPY constraints.txt ./
RUN pip install --constraint constraints.txt setuptools \
 && pip install --constraint constraints.txt --extra-index-url "$TORCH_INDEX" torch torchvision
COPY pyproject.toml README.md LICENSE ./
COPY *.py py.typed ./
COPY common common
COPY strategies strategies
COPY callbacks callbacks
COPY trainer trainer
COPY lightning lightning
COPY examples/digits.py examples/
RUN pip install --constraint constraints.txt --no-build-isolation '.[examples]'

FROM python:3.11-slim
# compile=True: Inductor compiles C++ for CPUs, and Triton C for GPUs, when a run begins.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
# The user of the rendered manifests. Its volume of runs is empty when it is made: it gets the owner of this folder.
RUN groupadd --gid 1000 echelon \
 && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp echelon \
 && install --directory --owner=echelon --group=echelon /runs
COPY --from=build /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /app
COPY examples examples
USER 1000:1000
# In this form no shell stands between the signals and the command. `docker run --init` reaps what it leaves behind; the
# rendered manifests see to that themselves.
ENTRYPOINT ["echelon"]
CMD ["--help"]
