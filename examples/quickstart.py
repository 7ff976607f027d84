"""FedHDP and its baselines on generated handwriting, as a table: `python examples/quickstart.py [ROUNDS [CLIENTS]]`."""

import sys

from fedhdp import AdaptiveClip, LocalTraining, Mechanism, PrivacyGroup, mlp, simulate
from fedhdp.algorithms import dp_fedavg, fedhdp, hdp_fedavg, non_private
from fedhdp.datasets import make_handwriting
from fedhdp.results.tables import format_table

rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
clients = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
data, model = make_handwriting(clients), mlp()

# One client in twenty opted out of privacy. The others have noise multiplier 1.5 and weight 0.01 on the server.
opted_out = PrivacyGroup("opted out", clients // 20, noise_multiplier=0.0, sampling_rate=0.05)
private = PrivacyGroup("private", clients - clients // 20, noise_multiplier=1.5, sampling_rate=0.05, weight=0.01)
mechanism = Mechanism((opted_out, private), clip=AdaptiveClip(initial=0.5))

training = LocalTraining(epochs=25, batch_size=20, learning_rate=0.5, decay=0.9, decay_every=50)
results = []
for algorithm in (non_private, dp_fedavg, hdp_fedavg, fedhdp):
    simulation = simulate(data, model, algorithm(mechanism), training, rounds=rounds)
    results.append(simulation.result(algorithm.__name__, delta=1e-4))
print(format_table(results))
