# Images of the service, with `rollout http` and Prometheus metrics; docs/install.md shows how to run them:
#
#     docker build --target cpu --tag rollout:cpu .
#     docker build --target cuda --tag rollout:cuda .
#
# Both run as user 1000. Packages have the versions of uv.lock, and its hashes: all but the cpu image's torch and what only torch
# needs. /opt/rollout/sbom.cdx.json lists the packages that were checked by hash (CycloneDX).

ARG PYTHON=3.12.12-slim-bookworm

# The wheel, with the kernels of every x86-64 (or of another architecture, in plain C), and the locked versions.
# Versions of Debian's packages are those of the pinned image.
FROM python:${PYTHON} AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /source
COPY pyproject.toml uv.lock setup.py README.md LICENSE ./
COPY engine ./engine
COPY transport ./transport
COPY recipes ./recipes
COPY rollout ./rollout
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . \
    && export="uv export --quiet --frozen --no-emit-project --extra serve --extra http --extra metrics" \
    && $export --output-file /wheels/locked.txt \
    && $export --prune torch --output-file /wheels/without-torch.txt \
    && $export --no-hashes --output-file /wheels/versions.txt \
    && sbom="$export --preview-features sbom-export --format cyclonedx1.5" \
    && $sbom --output-file /wheels/sbom.cdx.json \
    && $sbom --prune torch --output-file /wheels/sbom-without-torch.cdx.json

# Each file must have a hash of uv.lock. torch's index has the same version as PyPI, built for the CPU: it is another file, so it
# and what only torch needs are installed by version.
FROM python:${PYTHON} AS cpu-packages
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/rollout \
    && /opt/rollout/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement /wheels/without-torch.txt \
    && /opt/rollout/bin/pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
        --constraint /wheels/versions.txt "$(ls /wheels/*.whl)[serve,http,metrics]"

# torch from PyPI brings CUDA's libraries; the host has the driver and NVIDIA's container toolkit
FROM python:${PYTHON} AS cuda-packages
COPY --from=wheel /wheels /wheels
RUN python -m venv /opt/rollout \
    && /opt/rollout/bin/pip install --no-cache-dir --require-hashes --no-deps --requirement /wheels/locked.txt \
    && /opt/rollout/bin/pip install --no-cache-dir --no-deps /wheels/*.whl

FROM python:${PYTHON} AS user
RUN useradd --uid 1000 --create-home rollout \
    && install --directory --owner rollout --group rollout /cache
ENV PATH=/opt/rollout/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    ROLLOUT_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    ROLLOUT_ADDRESS=tcp://127.0.0.1:5655
EXPOSE 5655 8000
# A service with keys asks for one here too: ROLLOUT_ADDRESS is then a connection file with the role read.
HEALTHCHECK --interval=30s --timeout=20s --start-period=600s --retries=3 \
    CMD ["sh", "-c", "rollout status --timeout 10 --address \"$ROLLOUT_ADDRESS\" >/dev/null"]
ENTRYPOINT ["rollout"]
CMD ["serve", "--model", "smollm2"]

FROM user AS cpu
COPY --from=cpu-packages /opt/rollout /opt/rollout
COPY --from=wheel /wheels/sbom-without-torch.cdx.json /opt/rollout/sbom.cdx.json
USER 1000
WORKDIR /home/rollout

# Triton compiles a small C file for each kernel when it is first used
FROM user AS cuda
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
COPY --from=cuda-packages /opt/rollout /opt/rollout
COPY --from=wheel /wheels/sbom.cdx.json /opt/rollout/sbom.cdx.json
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/rollout
