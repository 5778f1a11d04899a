"""Data-parallel training with JAX: framework jax, two processes, gradients summed by XLA."""

import json
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Split

import falaj as fj

count, rank = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
jax.distributed.initialize(num_processes=count, process_id=rank)  # reads JAX_COORDINATOR_ADDRESS
mesh = jax.make_mesh((jax.device_count(),), ("rank",))
own = np.random.default_rng(rank).normal(size=(256, 4)).astype(np.float32)  # different rows in each rank
rows = jax.make_array_from_process_local_data(NamedSharding(mesh, Split("rank")), own)


@jax.jit
@partial(jax.shard_map, mesh=mesh, in_specs=(Split(), Split("rank")), out_specs=Split(), check_vma=False)
def train_step(weights: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    target = rows @ jnp.array([1.0, 2.0, 3.0, 4.0])
    loss, slope = jax.value_and_grad(lambda w: jnp.mean((rows @ w - target) ** 2))(weights)
    world = jax.lax.psum(1, "rank")
    return weights - 0.1 * jax.lax.psum(slope, "rank") / world, jax.lax.pmean(loss, "rank"), jnp.array(world)


weights, losses = jnp.zeros(4), []
for step in range(60):
    weights, loss, world = train_step(weights, rows)
    losses.append(float(loss))
    if rank == 0:
        fj.job.log(step=step, loss=losses[-1])

learned = {"world": int(world), "losses": losses, "weights": weights.tolist()}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
