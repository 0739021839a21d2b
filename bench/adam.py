"""Speed of the update kernels: split-master AdamW against torch's fused AdamW and memory bandwidth, and
every update against AdamW in fp32.

One round times, one after the other on the same machine state: a plain copy (torch's and a threaded
memmove, the faster one); a pass that reads and writes one array in place; the step of
torch.optim.AdamW(fused=True) in fp32 followed by the copy of the parameters to bf16; the split kernel
with bf16 gradients. Reported are medians over the rounds, ratios taken within a round.

The bandwidth is bytes read plus bytes written per second of the copy or of the pass in place,
whichever is faster: a copy also reads the lines that it is about to overwrite, which an update in
place does not, so it alone would be too easy a bound. All arrays lie in anonymous memory advised to
use huge pages.

Then every update works on one set of arrays, in rounds of its own (adam_updates.py): AdamW, Adam and
SGD with momentum in fp32, each beside torch's fused one; the same with split masters and bf16
gradients; AdamW with 8-bit moments. Each ratio is [median, least, most].

    python bench/adam.py --params 100M --pairs 7

The last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import threading
from typing import NamedTuple

import arguments as argument
import torch
from adam_updates import measure_updates
from arrays import huge_empty, seconds
from machine import facts

from tiermem.kernels import AdamWStep, Kernels, open_kernels

SPLIT_BYTES_PER_PARAM = 26  # hi 2, lo 2, moments 8 each way; gradient 2 read
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def threaded_memmove(destination: torch.Tensor, source: torch.Tensor, num_threads: int) -> None:
    """ctypes releases the GIL, so the parts are copied at the same time."""
    part = destination.nbytes // num_threads
    threads = [
        threading.Thread(
            target=ctypes.memmove,
            args=(destination.data_ptr() + i * part, source.data_ptr() + i * part, part),
        )
        for i in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Bandwidth:
    def __init__(self, nbytes: int, num_threads: int) -> None:
        self.source = huge_empty(nbytes, torch.uint8)
        self.destination = huge_empty(nbytes, torch.uint8)
        self.num_threads = num_threads

    def copy_bytes_per_s(self) -> float:
        best = min(
            seconds(lambda: self.destination.copy_(self.source)),
            seconds(lambda: threaded_memmove(self.destination, self.source, self.num_threads)),
        )
        return 2 * self.source.nbytes / best

    def in_place_bytes_per_s(self) -> float:
        words = self.destination.view(torch.float32)
        return 2 * words.nbytes / seconds(words.neg_)


class TorchFused:
    def __init__(self, grad: torch.Tensor) -> None:
        self.param = torch.nn.Parameter(huge_empty(grad.numel(), torch.float32).normal_())
        self.param.grad = huge_empty(grad.numel(), torch.float32).copy_(grad)
        self.hi = huge_empty(grad.numel(), torch.bfloat16)
        self.optimizer = torch.optim.AdamW(
            [self.param],
            lr=HYPER["lr"],
            betas=(HYPER["beta1"], HYPER["beta2"]),
            eps=HYPER["eps"],
            weight_decay=HYPER["weight_decay"],
            fused=True,
        )
        self.optimizer.state[self.param] = {
            "step": torch.tensor(0.0),
            "exp_avg": huge_empty(grad.numel(), torch.float32),
            "exp_avg_sq": huge_empty(grad.numel(), torch.float32),
        }

    def step(self) -> None:
        self.optimizer.step()
        with torch.no_grad():
            self.hi.copy_(self.param)


class Split:
    def __init__(self, kernels: Kernels, master: torch.Tensor, grad: torch.Tensor) -> None:
        self.kernels = kernels
        self.grad = grad
        self.hi = huge_empty(grad.numel(), torch.bfloat16)
        self.lo = huge_empty(grad.numel(), torch.int16)
        self.exp_avg = huge_empty(grad.numel(), torch.float32)
        self.exp_avg_sq = huge_empty(grad.numel(), torch.float32)
        self.steps = 0
        kernels.split_master(master, self.hi, self.lo)

    def step(self) -> None:
        self.steps += 1
        hyper = AdamWStep(**HYPER, step=self.steps)
        self.kernels.adamw_split(hyper, self.hi, self.lo, self.exp_avg, self.exp_avg_sq, self.grad)


class Round(NamedTuple):
    copy: float  # bytes read and written per second
    in_place: float
    torch_s: float
    split_s: float


def measure(params: int, pairs: int, kernels: Kernels) -> dict[str, object]:
    torch.manual_seed(0)
    grad = huge_empty(params, torch.bfloat16).normal_()
    reference = TorchFused(grad)
    split = Split(kernels, reference.param.detach(), grad)
    memory = Bandwidth(params * 8, kernels.num_threads)

    rounds = []
    for i in range(pairs + 1):
        copy, in_place = memory.copy_bytes_per_s(), memory.in_place_bytes_per_s()
        # Alternate, so that neither always runs right after the others.
        if i % 2:
            torch_s, split_s = seconds(reference.step), seconds(split.step)
        else:
            split_s, torch_s = seconds(split.step), seconds(reference.step)
        if i > 0:  # the first is the warm-up
            rounds.append(Round(copy, in_place, torch_s, split_s))

    assert_same(reference, split)
    speedups = [r.torch_s / r.split_s for r in rounds]
    rates = [params / r.split_s for r in rounds]
    moved = [rate * SPLIT_BYTES_PER_PARAM for rate in rates]
    fractions = [m / max(r.copy, r.in_place) for m, r in zip(moved, rounds, strict=True)]
    return {
        "benchmark": "adam",
        "params": params,
        "params_per_s": round(statistics.median(rates)),
        "torch_fused_params_per_s": round(statistics.median(params / r.torch_s for r in rounds)),
        "ratio_to_torch_fused": round(statistics.median(speedups), 3),
        "ratio_to_bandwidth": round(statistics.median(fractions), 3),
        "split_gb_per_s": round(statistics.median(moved) / 1e9, 2),
        "copy_gb_per_s": round(statistics.median(r.copy for r in rounds) / 1e9, 2),
        "in_place_gb_per_s": round(statistics.median(r.in_place for r in rounds) / 1e9, 2),
        "spread": {
            "params_per_s": [round(min(rates)), round(max(rates))],
            "ratio_to_torch_fused": [round(min(speedups), 3), round(max(speedups), 3)],
            "ratio_to_bandwidth": [round(min(fractions), 3), round(max(fractions), 3)],
        },
        "pairs": pairs,
    }


def assert_same(reference: TorchFused, split: Split) -> None:
    """Both did the same steps: the same parameters, but for the tails of torch's slices (1 ulp)."""
    out = torch.empty(split.hi.numel())
    split.kernels.merge_master(split.hi, split.lo, out)
    difference = int((out != reference.param.detach()).sum())
    if difference > 1e-4 * out.numel():
        raise SystemExit(f"results differ in {difference} of {out.numel()} parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--params", type=argument.count, default="100M", help="e.g. 100M")
    parser.add_argument("--pairs", type=int, default=7, help="timed rounds")
    parser.add_argument("--kernels", default="auto", help="auto, avx512, avx2, plain or torch")
    parser.add_argument("--threads", type=int, default=None, help="default: the cores of the process")
    parser.add_argument("--json", action="store_true", help="nothing but the JSON line")
    options = parser.parse_args()

    with open_kernels(options.kernels, options.threads) as kernels:
        torch.set_num_threads(kernels.num_threads)
        result = measure(options.params, options.pairs, kernels)
        updates = measure_updates(options.params, options.pairs, kernels)
        result |= {
            "updates": updates,
            "isa": kernels.name,
            "num_threads": kernels.num_threads,
            **facts(),
        }
    if not options.json:
        print(
            f"split AdamW ({result['isa']}, {result['num_threads']} threads): "
            f"{float(str(result['params_per_s'])) / 1e6:.0f} M parameters/s, "
            f"{result['ratio_to_torch_fused']} x torch fused + copy to bf16, "
            f"{result['ratio_to_bandwidth']} of the memory bandwidth "
            f"(copy {result['copy_gb_per_s']}, in place {result['in_place_gb_per_s']} GB/s)"
        )
        for name, row in updates.items():
            beside = row.get("ratio_to_torch_fused", [])[:1]
            print(
                f"{name:16} {row['ns_per_param']:6.3f} ns/parameter, "
                f"{row['bytes_per_param']:4.1f} bytes/parameter, "
                f"{row['gb_per_s']:5.1f} GB/s, {row['time_to_adamw_fp32'][0]:.2f} x the time of AdamW"
                + "".join(f", {ratio:.2f} x torch fused" for ratio in beside)
            )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
