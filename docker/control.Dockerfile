# The gateway and the scheduler: no torch, one image. Run `python -m gateway` or `python -m scheduler_service` in it.
ARG BASE_IMAGE=python:3.12-slim
FROM ${BASE_IMAGE}

WORKDIR /opt/blockyard
RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

# Dependencies first: they change less often than the code.
COPY pyproject.toml ./
RUN mkdir blockyard && touch README.md LICENSE blockyard/__init__.py \
    && pip install --no-cache-dir --disable-pip-version-check --editable '.[gateway,scheduler]' \
    && rm -r README.md LICENSE blockyard

COPY LICENSE ./
COPY blockyard blockyard
COPY gateway gateway
COPY scheduler_service scheduler_service
COPY models/demo /models/demo
RUN python -m compileall -q blockyard gateway scheduler_service

USER 65532:65532
ENV HOME=/tmp BLOCKYARD_MODEL=/models/demo
EXPOSE 8000 50051 50052 50060
CMD ["python", "-m", "gateway"]
