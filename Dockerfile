# docker build -t powertrain .
# docker run --gpus all --ipc host -v "$PWD/runs:/runs" powertrain train quickstart
#
# --ipc host: NCCL and the processes that read data share memory. The host needs NVIDIA's container toolkit and a driver
# for CUDA 13.
FROM nvidia/cuda:13.0.1-runtime-ubuntu24.04

# gcc and Python's headers: torch.compile and the Triton kernels of other libraries build their launcher with them;
# ours need none
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-venv python3-dev gcc \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/powertrain
ENV PATH=/opt/powertrain/bin:$PATH PYTHONUNBUFFERED=1

# torch first: its layer stays when only our code changes
COPY constraints.txt /tmp/constraints.txt
RUN grep '^torch==' /tmp/constraints.txt | cut -d ' ' -f 1 > /tmp/torch.txt \
    && pip install --no-cache-dir --requirement /tmp/torch.txt

COPY pyproject.toml README.md LICENSE /src/
COPY scripts /src/scripts
COPY powertrain /src/powertrain
RUN pip install --no-cache-dir '/src[all]' && powertrain --version

WORKDIR /
ENTRYPOINT ["powertrain"]
CMD ["--help"]
