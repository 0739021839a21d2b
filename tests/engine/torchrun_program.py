"""A program as people write it for DeepSpeed, for torchrun: nothing initialises torch.distributed."""

from __future__ import annotations

import argparse
import hashlib

import torch
import torch.distributed as dist
from engine_rig import loss_of, make_net

import tiermem as deepspeed

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
args = deepspeed.add_config_arguments(parser).parse_args()

torch.set_num_threads(1)
model = make_net()
engine, optimizer, _, _ = deepspeed.initialize(
    args=args, model=model, model_parameters=model.parameters()
)
for step in range(3):
    loss = loss_of(engine, 10 * step + engine.global_rank)
    engine.backward(loss)
    engine.step()
digest = hashlib.sha256()
for param in model.parameters():
    digest.update(deepspeed.safe_get_full_fp32_param(param).numpy().tobytes())
print("rank", dist.get_rank(), "of", engine.world_size, digest.hexdigest(), flush=True)
