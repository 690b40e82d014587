# The worker, with torch. It runs on any processor that the kernels were compiled for, or on a GPU.
#
# BASE_IMAGE is any image with Python 3.11 or newer, its venv and apt-get. TORCH_INDEX_URL is where pip takes torch from, and so
# which build: https://download.pytorch.org/whl/cu130 for GPUs. Empty: wherever pip looks for everything else.
ARG BASE_IMAGE=python:3.12-slim

# The kernels for CPUs. Their compiler stays out of the image: a worker never compiles these.
FROM ${BASE_IMAGE} AS kernels
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/blockyard
COPY blockyard_kernels/cpu/build.py blockyard_kernels/cpu/build.py
COPY blockyard_kernels/cpu/csrc blockyard_kernels/cpu/csrc
RUN python3 blockyard_kernels/cpu/build.py && rm blockyard_kernels/cpu/built/*/lock

# What the worker imports. Neither pip nor what it was told stays in the image.
FROM ${BASE_IMAGE} AS environment
# pip's own variables, for another index or a folder of wheels; where they are empty, the base image's settings hold.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv
WORKDIR /opt/blockyard
# Torch first: it changes least often.
COPY install_torch.sh ./
RUN sh install_torch.sh python "${TORCH_INDEX_URL}"
COPY pyproject.toml ./
# Without the code, which changes more often than what it needs. setuptools stays: torch requires it.
RUN mkdir blockyard && touch README.md LICENSE blockyard/__init__.py \
    && pip install --editable '.[worker,grammar,tracing]' \
    && pip uninstall --yes pip
# Torch's own tests, and headers that nothing here is compiled with: 145 MB.
RUN rm -rf /opt/venv/lib/python3*/site-packages/torch/test /opt/venv/lib/python3*/site-packages/torch/include

# Torch for GPUs brings Triton, which compiles kernels when they are first launched, and with a C compiler and Python's
# headers what launches them. On other images there is none.
FROM ${BASE_IMAGE} AS runtime
COPY --from=environment /opt/venv /opt/venv
RUN set -e; ls -d /opt/venv/lib/python3*/site-packages/triton || exit 0; \
    headers=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))'); \
    packages='gcc libc6-dev'; test -e "$headers/Python.h" || packages="$packages libpython3-dev"; \
    apt-get update; apt-get install --yes --no-install-recommends $packages; rm -rf /var/lib/apt/lists/*; \
    echo '#include <Python.h>' | gcc -I"$headers" -fsyntax-only -x c -

FROM runtime
LABEL org.opencontainers.image.title="Blockyard worker" org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.source=https://github.com/blockyard/blockyard
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/blockyard PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /opt/blockyard
COPY models/demo/*.json models/demo/*.safetensors /models/demo/
COPY LICENSE ./
COPY blockyard blockyard
COPY blockyard_kernels blockyard_kernels
COPY --from=kernels /opt/blockyard/blockyard_kernels/cpu/built blockyard_kernels/cpu/built
COPY worker_service worker_service
RUN python -m compileall -q blockyard blockyard_kernels worker_service

USER 65532:65532
ENV BLOCKYARD_WORKER_ADDRESS=0.0.0.0:50070 BLOCKYARD_WORKER_HEALTH_PORT=50071
EXPOSE 50070
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s \
    CMD ["python", "-m", "blockyard.service.healthcheck", "127.0.0.1:50071"]
CMD ["python", "-m", "worker_service"]
