# The gateway and the scheduler: no torch, one image. Run `python -m gateway` or `python -m scheduler_service` in it.
#
# BASE_IMAGE is any image with Python 3.11 or newer and its venv. The instructions are those that every builder knows,
# the one without BuildKit among them.
ARG BASE_IMAGE=python:3.12-slim

# What the services import. Neither pip nor what it was told stays in the image.
FROM ${BASE_IMAGE} AS environment
# pip's own variables, for another index or a folder of wheels; where they are empty, the base image's settings hold.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
RUN python3 -m venv /opt/venv
WORKDIR /opt/blockyard
COPY pyproject.toml ./
# Without the code, which changes more often than what it needs.
RUN mkdir blockyard && touch README.md LICENSE blockyard/__init__.py \
    && pip install --editable '.[cli,gateway,grammar,scheduler,tracing]' \
    && pip uninstall --yes setuptools pip

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="Blockyard gateway and scheduler" org.opencontainers.image.licenses=Apache-2.0 \
    org.opencontainers.image.source=https://github.com/blockyard/blockyard
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/opt/blockyard PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
WORKDIR /opt/blockyard
COPY --from=environment /opt/venv /opt/venv
# Of the demo model what these two read: its weights are the worker's.
COPY models/demo/*.json /models/demo/
COPY LICENSE ./
COPY blockyard blockyard
COPY gateway gateway
COPY scheduler_service scheduler_service
RUN python -m compileall -q blockyard gateway scheduler_service

USER 65532:65532
ENV BLOCKYARD_MODEL=/models/demo BLOCKYARD_HOST=0.0.0.0 \
    BLOCKYARD_GATEWAY_HEALTH_PORT=50053 BLOCKYARD_SCHEDULER_HEALTH_PORT=50061
EXPOSE 8000 50051 50052 50060
# The gateway's; for the scheduler, docker-compose.yml has another.
HEALTHCHECK --interval=5s --timeout=5s --start-period=600s \
    CMD ["python", "-m", "blockyard.service.healthcheck", "127.0.0.1:50053"]
CMD ["python", "-m", "gateway"]
