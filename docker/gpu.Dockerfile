# raypo on NVIDIA GPUs. Not built by any test: write an issue if it does not build.
#   docker build -f docker/gpu.Dockerfile -t raypo:gpu .
#   docker run --rm -it --gpus all --ipc=host -v raypo-cache:/root/.cache/raypo -v "$PWD:/work" \
#       raypo:gpu raypo train run.yaml
# --ipc=host (or --shm-size=16g) gives NCCL and vLLM the shared memory of the host instead of 64 MB.
# The volume raypo-cache keeps compiled kernels: without it each container compiles for a minute or two.
# The CUDA compiler is for kernels that vLLM and DeepSpeed compile at run time.
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/venv PATH=/opt/venv/bin:$PATH
COPY . /opt/raypo
WORKDIR /opt/raypo
RUN python3 -m venv $VIRTUAL_ENV && pip install --no-cache-dir uv \
    && uv pip install --no-cache --constraint constraints-gpu.txt ".[gpu,all,math]"
WORKDIR /work
CMD ["raypo", "--help"]
