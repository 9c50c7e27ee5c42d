# pagefleet on CPUs. From the repository's root:
#   docker build -f deploy/docker/cpu.Dockerfile -t pagefleet:cpu .
# PIP_EXTRA_INDEX_URL chooses torch's CPU build, which is much smaller than the usual one.
ARG PYTHON=3.11.13-slim-bookworm

FROM python:${PYTHON} AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE __init__.py ./
COPY protos protos
COPY scheduler scheduler
COPY kernels kernels
COPY workers workers
COPY cluster cluster
RUN PAGEFLEET_REQUIRE_NATIVE=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}
ARG PIP_EXTRA_INDEX_URL=""
# 0 = without the default model, for clusters that serve others only
ARG FETCH_DEFAULT_MODEL=1
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libgomp1 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home pagefleet
COPY --from=build /wheels /wheels
# into the system's Python: Kubernetes' operator starts Ray from a login shell, whose PATH it is in
RUN pip install --no-cache-dir /wheels/*.whl && rm -rf /wheels
ENV PAGEFLEET_CACHE=/opt/pagefleet \
    PAGEFLEET_HEARTBEATS=/tmp/pagefleet-heartbeats \
    RAY_USAGE_STATS_ENABLED=0 \
    HF_HUB_DISABLE_TELEMETRY=1 \
    OMP_WAIT_POLICY=passive \
    PYTHONUNBUFFERED=1
RUN install --directory --owner=pagefleet --group=pagefleet /opt/pagefleet
USER 10001:10001
WORKDIR /home/pagefleet
RUN if [ "${FETCH_DEFAULT_MODEL}" = 1 ]; then pagefleet models fetch; fi
EXPOSE 8000 50051
HEALTHCHECK --interval=20s --timeout=15s --start-period=5m --retries=3 CMD ["pagefleet", "probe"]
CMD ["pagefleet", "serve", "--host", "0.0.0.0"]
