"""Training with MXNet and parameter servers: framework mxnet; servers and scheduler run beside the workers."""

import json

import mxnet as mx
from mxnet import autograd, gluon

import falaj as fj

store = mx.kv.create("dist_sync")  # reads DMLC_*
rank, world = store.rank, store.num_workers
mx.random.seed(rank)  # different rows in each rank
rows = mx.nd.random.normal(shape=(256, 4))
target = mx.nd.dot(rows, mx.nd.array([[1], [2], [3], [4]]))
model = gluon.nn.Dense(1, use_bias=False, in_units=4)
model.initialize(mx.init.Zero())
trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)

losses = []
for step in range(60):
    with autograd.record():
        loss = ((model(rows) - target) ** 2).sum()
    loss.backward()
    trainer.step(len(rows) * world)  # by the mean over all workers
    losses.append(loss.asscalar().item() / len(rows))
    if rank == 0:
        fj.job.log(step=step, loss=losses[-1])

learned = {"world": world, "losses": losses, "weights": model.weight.data().asnumpy().ravel().tolist()}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
