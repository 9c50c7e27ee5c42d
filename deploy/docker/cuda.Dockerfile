# pagefleet on NVIDIA GPUs. From the repository's root:
#   docker build -f deploy/docker/cuda.Dockerfile -t pagefleet:cuda .
# The toolkit stays in the image: FlashInfer compiles its kernels for the GPU that it finds.
ARG CUDA=13.0.2-devel-ubuntu24.04

FROM nvidia/cuda:${CUDA} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ python3.12 python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:${PATH}
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE __init__.py ./
COPY protos protos
COPY scheduler scheduler
COPY kernels kernels
COPY workers workers
COPY cluster cluster
RUN PAGEFLEET_REQUIRE_NATIVE=1 pip install --no-cache-dir ".[cuda]"

FROM nvidia/cuda:${CUDA}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ libgomp1 ninja-build python3.12 python3.12-dev \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home pagefleet
COPY --from=build /opt/venv /opt/venv
# Kubernetes' operator starts Ray from a login shell, which forgets the PATH below
RUN ln -s /opt/venv/bin/python /opt/venv/bin/ray /opt/venv/bin/serve /opt/venv/bin/pagefleet \
    /usr/local/bin/
ENV PATH=/opt/venv/bin:${PATH} \
    PAGEFLEET_CACHE=/home/pagefleet/.cache/pagefleet \
    PAGEFLEET_HEARTBEATS=/tmp/pagefleet-heartbeats \
    RAY_USAGE_STATS_ENABLED=0 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    OMP_WAIT_POLICY=passive \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /home/pagefleet
EXPOSE 8000 50051
HEALTHCHECK --interval=20s --timeout=15s --start-period=15m --retries=3 CMD ["pagefleet", "probe"]
CMD ["pagefleet", "serve", "--host", "0.0.0.0", "--device", "cuda"]
