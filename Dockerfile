# CPU by default; for CUDA: docker build --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# A CUDA base has no Python; the Python base has one already.
RUN command -v python3 >/dev/null \
    || (apt-get update && apt-get install -y --no-install-recommends python3 python3-venv && rm -rf /var/lib/apt/lists/*)

WORKDIR /opt/pl-pipe
COPY . .
RUN python3 -m venv .venv && .venv/bin/pip install --no-cache-dir -c constraints.txt ".[tensorboard,text,metrics]"

WORKDIR /work
ENTRYPOINT ["/opt/pl-pipe/.venv/bin/pl-pipe"]
CMD ["--help"]
