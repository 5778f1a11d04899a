"""Synchronous training with TensorFlow in a custom loop, since Keras 3 cannot: framework tensorflow, two workers."""

import json

import tensorflow as tf

import falaj as fj

strategy = tf.distribute.MultiWorkerMirroredStrategy()  # reads TF_CONFIG
rank, world = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
rows = tf.random.stateless_normal([256, 4], seed=[rank, 0])  # different rows in each rank
target = rows @ [[1.0], [2.0], [3.0], [4.0]]
with strategy.scope():
    weights = tf.Variable(tf.zeros([4, 1]), aggregation=tf.VariableAggregation.MEAN)


def descend() -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((rows @ weights - target) ** 2)
    weights.assign_sub(0.1 * tape.gradient(loss, weights))  # by the mean over all workers
    return loss


@tf.function
def train_step() -> tf.Tensor:
    return strategy.reduce("MEAN", strategy.run(descend), axis=None)


losses = []
for step in range(60):
    losses.append(float(train_step()))
    if rank == 0:
        fj.job.log(step=step, loss=losses[-1])

learned = {"world": world, "losses": losses, "weights": weights.numpy().ravel().tolist()}
(fj.job.outputs / f"rank-{rank}.json").write_text(json.dumps(learned))
