"""A replay buffer between actors and a learner: actors fill it from one thread of the driver each, the ranks train.

The task is a bandit: four machines, of which the third pays best. Actors pull by the newest policy that they have and
remember what came of it; the step, `data_parallel` over the ranks, learns from batches of what is remembered. Batches
go from the buffer's rank to all ranks: the driver holds a `Ref`.
"""

import threading

import torch

from spmd import Mesh, data_parallel, grad, spmd

PAYS = torch.tensor([0.2, 0.4, 0.9, 0.1])


class Buffer:
    def __init__(self, seed):
        self.pulls, self.random = [], torch.Generator().manual_seed(seed)

    def add(self, pulls):
        self.pulls = (self.pulls + pulls)[-2000:]
        return len(self.pulls)

    def sample(self, count):
        chosen = torch.randint(len(self.pulls), (count,), generator=self.random).tolist()
        arms, rewards = zip(*(self.pulls[index] for index in chosen), strict=True)
        return {"arm": torch.tensor(arms), "reward": torch.tensor(rewards)}


class Actor:
    def __init__(self, buffer, seed):
        self.buffer, self.random = buffer, torch.Generator().manual_seed(seed)

    def act(self, values, count):
        policy = torch.softmax(values * 3, 0)
        arms = torch.multinomial(policy, count, replacement=True, generator=self.random)
        rewards = torch.bernoulli(PAYS[arms], generator=self.random)
        return self.buffer.add(list(zip(arms.tolist(), rewards.tolist(), strict=True)))  # a Ref: it does not wait


mesh = Mesh({"data": 2})
buffer = mesh.remote(Buffer, 0, rank=1)
actors = [mesh.remote(Actor, buffer, seed, rank=rank) for seed, rank in enumerate((0, 1, 0))]


def loss_fn(values, batch):
    return (values[batch["arm"]] - batch["reward"]).square().mean()


@spmd(mesh=mesh)
@data_parallel
def train_step(values, batch):
    return values - 0.5 * grad(loss_fn)(values, batch)


values = torch.zeros(4)
newest, stop, pulls = [values], threading.Event(), []


def drive(actor):
    while not stop.is_set():
        pulls.append(actor.act(newest[0], 20).get())


assert [actor.act(values, 50).get() for actor in actors] == [50, 100, 150]
threads = [threading.Thread(target=drive, args=(actor,)) for actor in actors]
for thread in threads:
    thread.start()
for step in range(200):
    values = train_step(values, buffer.sample(64))
    if step % 10 == 9:
        newest[0] = values.full()
stop.set()
for thread in threads:
    thread.join()

found = values.full()
assert int(found.argmax()) == 2 and abs(float(found[2]) - 0.9) < 0.2, found
assert pulls, "the actors pulled while the ranks trained"
print(f"{20 * len(pulls)} pulls beside 200 steps: values and pay agree, {[round(v, 2) for v in found.tolist()]}")
mesh.close()
