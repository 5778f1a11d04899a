"""Asynchronous training with TensorFlow and parameter servers: framework tensorflow, roles chief, worker and ps."""

import json

import tensorflow as tf

import falaj as fj

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    cluster, role, index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    tf.distribute.Server(cluster, job_name=role, task_index=index).join()  # until it is killed

strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weights = tf.Variable(tf.zeros([4, 1]))


def rows_of_a_worker() -> tf.data.Dataset:
    name = tf.data.Dataset.range(1).map(lambda _: tf.random.uniform([])).cache().repeat()
    return tf.data.Dataset.zip((name, tf.data.Dataset.from_tensors(tf.random.normal([64, 4])).repeat()))


@tf.function
def train_step(iterator: tf.data.Iterator) -> tuple[tf.Tensor, tf.Tensor]:
    name, rows = next(iterator)
    target = rows @ [[1.0], [2.0], [3.0], [4.0]]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((rows @ weights - target) ** 2)
    weights.assign_sub(0.05 * tape.gradient(loss, weights))
    return name, loss


iterator = iter(coordinator.create_per_worker_dataset(rows_of_a_worker))
results = [coordinator.schedule(train_step, args=(iterator,)) for _ in range(400)]
coordinator.join()

names, losses = zip(
    *((float(name), float(loss)) for name, loss in (each.fetch() for each in results)), strict=True
)
for step, loss in enumerate(losses):
    fj.job.log(step=step, loss=loss)
learned = {"world": len(set(names)), "losses": losses, "weights": weights.numpy().ravel().tolist()}
(fj.job.outputs / "rank-0.json").write_text(json.dumps(learned))
