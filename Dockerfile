# chatsvc with its default model, for CPUs. Build: docker compose build
#
# torch is several gigabytes with CUDA and about 200 MB without. To get the CPU build, pass the extra index that
# PyTorch's own install page names:  docker compose build --build-arg PIP_EXTRA_INDEX_URL=...
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL
WORKDIR /src
RUN python -m venv /opt/chatsvc
# What is large and changes least comes first.
COPY constraints.txt ./
RUN /opt/chatsvc/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY kernels ./kernels
COPY chatsvc ./chatsvc
RUN /opt/chatsvc/bin/pip install --no-cache-dir --disable-pip-version-check -c constraints.txt . \
 && /opt/chatsvc/bin/chatsvc pull smollm2-135m
COPY docker/healthcheck.py /opt/chatsvc/healthcheck.py

FROM python:3.11-slim
RUN useradd --uid 10001 --create-home --home-dir /data chatsvc
COPY --from=build /opt/chatsvc /opt/chatsvc
ENV PATH=/opt/chatsvc/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HOME=/data/huggingface \
    CHATSVC_HOST=0.0.0.0 \
    CHATSVC_PORT=8000 \
    CHATSVC_SESSION_STORE=sqlite:////data/chatsvc.db
USER 10001
WORKDIR /data
VOLUME /data
EXPOSE 8000
# Readiness, not a mere open port; by the interpreter that is there. The start period covers loading a model.
HEALTHCHECK --interval=10s --timeout=5s --start-period=180s --retries=3 \
  CMD ["/opt/chatsvc/bin/python", "/opt/chatsvc/healthcheck.py"]
STOPSIGNAL SIGTERM
CMD ["chatsvc", "serve"]
