# lowroll as a command, on a CPU, or on a GPU where the NVIDIA container toolkit gives it one:
#
#     docker build -t lowroll .
#     docker run --rm lowroll                                                    # lowroll doctor
#     docker run --rm --gpus all -v "$PWD:/work" lowroll grpo run.yaml
#
# g++ builds the CPU's kernels on first use. The kernels in CUDA need nvcc, which is not in here; Triton's take their
# place. Programs as rewards (docs/programs.md) need user namespaces, which Docker's default profile refuses.
FROM python:3.11-slim

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /build
COPY constraints.txt ./
RUN pip install --no-cache-dir --constraint constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY lowroll ./lowroll
RUN pip install --no-cache-dir --constraint constraints.txt '.[envs,data]'

RUN useradd --create-home --uid 1000 lowroll && install --directory --owner lowroll /work
USER 1000
WORKDIR /work
RUN lowroll doctor

ENTRYPOINT ["lowroll"]
CMD ["doctor"]
