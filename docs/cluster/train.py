"""What slurm.sh, job.yaml and jobset.yaml run: a long run that goes on wherever it was ended.

It exits with 0 when all steps are done, and with 75 where it was asked to end before that, and has saved:
then the scheduler is to start it again.
"""

import argparse
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sbp

options = argparse.ArgumentParser()
options.add_argument("--checkpoint", required=True, help="a folder that all hosts see, or gs://..., s3://...")
options.add_argument("--steps", type=int, default=100_000)
options.add_argument("--save-every", type=int, default=500)
options.add_argument("--coordinator", help="host:port of process 0, under Kubernetes; SLURM says it itself")
options.add_argument("--processes", type=int, help="how many there are, under Kubernetes")
options.add_argument("--step-seconds", type=float, default=0.0, help="a pause, to try it out")
args = options.parse_args()

index = int(os.environ["JOB_COMPLETION_INDEX"]) if args.coordinator else None
# One process has all GPUs of its host.
sbp.initialize(args.coordinator, args.processes, index, local_device_ids=range(8))

optimizer = optax.adam(1e-2)


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - y) ** 2)


def train_step(params, opt_state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def batches(step):
    time.sleep(args.step_seconds)
    rng = np.random.default_rng(step)
    return tuple(rng.normal(size=(64, 16)).astype(np.float32) for _ in range(2))


rng = np.random.default_rng(0)
params = {"up": rng.normal(size=(16, 64)).astype(np.float32) / 4}
params["down"] = rng.normal(size=(64, 16)).astype(np.float32) / 8
devices = sbp.placement(jax.default_backend(), shape=(jax.device_count(),))
program = sbp.compile(train_step, devices, in_sbp=([sbp.B], sbp.AUTO, [sbp.S(0)]))
state = params, jax.tree.map(np.asarray, optimizer.init(params))
done = sbp.fit(
    program, state, batches, steps=args.steps, checkpoint=args.checkpoint, save_every=args.save_every
)
sys.exit(0 if done.is_done else os.EX_TEMPFAIL)
