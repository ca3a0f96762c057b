# Microscale for CUDA, on x86-64 and aarch64: docker build -t microscale .
#
# It needs NVIDIA's container toolkit on the host and nothing of CUDA in the base image: torch brings its libraries, Triton
# its assembler. It runs as a user without rights and writes nowhere but to /cache and /tmp: docker run --read-only
# --tmpfs /tmp --volume microscale:/cache --gpus all --publish 127.0.0.1:8000:8000 microscale
#
#   TORCH_BUILD   cuda, or cpu where pip's index has torch's build for CPUs
#   WARM_GPUS     cards whose kernels are compiled now, as "rtx5090 gb10"; a card that is not named compiles at its first start
#   WARM_MODELS   the models they are compiled for
#   WARM_OPTIONS  what `microscale serve` will be given of --precision, --kv-cache-dtype and the like
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /src
COPY locks locks
COPY tools/install_locked.sh tools/
ARG TORCH_BUILD=cuda
RUN python -m venv /opt/microscale && TORCH_BUILD=${TORCH_BUILD} tools/install_locked.sh /opt/microscale/bin/python server
COPY pyproject.toml README.md LICENSE ./
COPY tools/wheel.py tools/
COPY src src
RUN /opt/microscale/bin/python tools/wheel.py /dist \
    && /opt/microscale/bin/python -m pip install --no-deps --no-index /dist/*.whl \
    && /opt/microscale/bin/python -m pip check

# Triton builds a small C module for the driver; the versions are Debian's, which mends them.
FROM ${PYTHON_IMAGE} AS base
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /cache microscale \
    && install --directory --owner=10001 --group=10001 /cache /cache/kernels
COPY --from=build /opt/microscale /opt/microscale
ENV PATH=/opt/microscale/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/kernels \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /cache

FROM base AS warm
ARG WARM_GPUS=""
ARG WARM_MODELS="gpt-oss-20b"
ARG WARM_OPTIONS=""
# hadolint ignore=SC2086
RUN for model in ${WARM_MODELS}; do for gpu in ${WARM_GPUS}; do \
    microscale warm "$model" --gpu "$gpu" ${WARM_OPTIONS} || exit 1; done; done

# A new volume starts as a copy of what the image has in /cache: the kernels that were compiled above.
FROM base AS run
COPY --from=warm --chown=10001:10001 /cache /cache
VOLUME /cache
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=15m --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["microscale"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
