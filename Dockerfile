# `anyaccel serve` in a container. For a CPU:
#
#     docker build -t anyaccel .
#
# For an accelerator, use the vendor's image, which has a torch build for the device:
#
#     docker build -t anyaccel --build-arg BASE=vault.habana.ai/gaudi-docker/1.22.2/ubuntu24.04/habanalabs/pytorch-installer-2.7.1:1.22.2-32 .
#
# pip keeps a torch that the base image already has. Without one it installs the default build, which on x86_64 includes
# gigabytes of CUDA libraries. To install another, set TORCH to the arguments after `pip install` that
# https://pytorch.org/get-started/locally/ shows for it.
ARG BASE=python:3.11-slim
FROM ${BASE}
ARG TORCH=""

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 \
    ANYACCEL_CACHE=/data/cache HF_HOME=/data/hub

WORKDIR /opt/anyaccel
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN if [ -n "${TORCH}" ]; then python3 -m pip install ${TORCH}; fi \
 && python3 -m pip install '.[serve]' \
 && (id anyaccel >/dev/null 2>&1 || useradd --create-home --uid 10001 anyaccel) \
 && mkdir -p /data && chown anyaccel /data

USER anyaccel
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
# The start period covers the download and the warm-up of a model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m \
  CMD python3 -c "import urllib.request as u; u.urlopen(u.Request('http://127.0.0.1:8000/healthz', headers={'Host': 'localhost'}))"

# The service requires a key because it does not listen on loopback: set ANYACCEL_API_KEYS, or pass --no-key.
ENTRYPOINT ["python3", "-m", "anyaccel", "serve", "--host", "0.0.0.0", "--data", "/data/serve"]
