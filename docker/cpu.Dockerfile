# raypo on CPUs. Not built by any test: write an issue if it does not build.
#   docker build -f docker/cpu.Dockerfile -t raypo:cpu .
#   docker run --rm -it --shm-size=4g -v "$PWD:/work" raypo:cpu raypo plan run.yaml
FROM python:3.11-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make \
    && rm -rf /var/lib/apt/lists/*
COPY . /opt/raypo
WORKDIR /opt/raypo
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --torch-backend cpu --constraint constraints.txt \
       --override scripts/overrides-cpu.txt ".[cpu,all,math]"
WORKDIR /work
CMD ["raypo", "--help"]
