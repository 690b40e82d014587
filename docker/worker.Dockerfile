# The worker, with torch. TORCH_INDEX_URL says which build: the default is for CPUs; for a GPU give the index of its
# CUDA version, https://download.pytorch.org/whl/cu128 for one.
ARG BASE_IMAGE=python:3.12-slim

# The kernels for CPUs. Its compiler stays out of the image.
FROM ${BASE_IMAGE} AS kernels
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/blockyard
COPY kernels kernels
RUN python3 -m kernels.cpu.build

FROM ${BASE_IMAGE}

ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu

WORKDIR /opt/blockyard
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# Torch first, then the other dependencies: they change less often than the code.
COPY install_torch.sh ./
RUN PIP_NO_CACHE_DIR=1 sh install_torch.sh python "${TORCH_INDEX_URL}"
COPY pyproject.toml ./
RUN mkdir blockyard && touch README.md LICENSE blockyard/__init__.py \
    && pip install --no-cache-dir --disable-pip-version-check --editable '.[worker]' \
    && rm -r README.md LICENSE blockyard

COPY LICENSE ./
COPY blockyard blockyard
COPY kernels kernels
COPY --from=kernels /opt/blockyard/kernels/cpu/built kernels/cpu/built
COPY worker_service worker_service
COPY models/demo /models/demo
RUN python -m compileall -q blockyard kernels worker_service

USER 65532:65532
ENV HOME=/tmp
EXPOSE 50070
CMD ["python", "-m", "worker_service"]
