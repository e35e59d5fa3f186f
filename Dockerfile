# quengine in a container, of the wheel of this checkout: docs/install.md.
#     docker build -t quengine .                                        PyTorch for CUDA
#     docker build -t quengine:cpu --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .    PyTorch's CPU build
ARG PYTHON=3.11

FROM python:${PYTHON}-slim AS wheel
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=""
# Triton compiles the stubs that launch kernels with a C compiler; the CPU build does without.
RUN if [ -z "$TORCH_INDEX" ]; then \
        apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*; \
    fi
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    --mount=type=bind,from=wheel,source=/src/constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir -c /constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} /wheels/*.whl

# Models, compiled kernels, presets and sessions are below /home/engine, which a volume keeps.
RUN useradd --create-home --uid 1000 engine
USER 1000
WORKDIR /home/engine
ENV TRITON_CACHE_DIR=/home/engine/.cache/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /home/engine
EXPOSE 8080
ENTRYPOINT ["engine"]
CMD ["--help"]
