# Two images of one environment:
#   docker build --target seed -t p2p-co2-seed .
#   docker build --target peer -t p2p-co2-peer .
# docs/how-to/systemd-and-containers.md says how to run them. torch computes on processors, unless its packages are
# looked for elsewhere: --build-arg TORCH_INDEX= takes the build for CUDA.
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE constraints.txt ./
COPY p2p_co2 p2p_co2
COPY peers peers
COPY bootstrap bootstrap
COPY monitoring monitoring
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .
RUN python -m venv /opt/p2p-co2
RUN PIP_EXTRA_INDEX_URL="$TORCH_INDEX" /opt/p2p-co2/bin/python -m pip install --no-cache-dir \
    --constraint constraints.txt "p2p-co2${EXTRAS} @ file://$(ls /wheels/*.whl)"

FROM python:${PYTHON}-slim AS base
COPY --from=build /opt/p2p-co2 /opt/p2p-co2
RUN useradd --create-home --uid 10001 p2p-co2
RUN install -d -o p2p-co2 -g p2p-co2 -m 0700 /data
ENV PATH=/opt/p2p-co2/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 XDG_DATA_HOME=/data
# For a peer that is given a GPU: its driver's libraries for computing.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER p2p-co2
WORKDIR /data
VOLUME /data
STOPSIGNAL SIGINT

FROM base AS seed
ENV P2P_CO2_PORT=31337
EXPOSE 31337
HEALTHCHECK --interval=60s --timeout=10s --start-period=60s \
    CMD python -c "import os, socket; socket.create_connection(('127.0.0.1', int(os.environ['P2P_CO2_PORT'])), 5)"
ENTRYPOINT ["p2p-co2", "seed"]

# Without a health check: a peer that waits for its hours, or for the network, is well. One that cannot go on ends.
FROM base AS peer
ENTRYPOINT ["p2p-co2", "join"]
