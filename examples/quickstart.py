"""FedHDP against its baselines in Python: data, promise, algorithms, table. Run: `python examples/quickstart.py`."""

from fedhdp.algorithms import dp_fedavg, fedhdp, hdp_fedavg, non_private
from fedhdp.client import LocalTraining
from fedhdp.datasets.handwriting import handwriting
from fedhdp.mechanism import AdaptiveClip, Mechanism, PrivacyGroup
from fedhdp.models import mlp
from fedhdp.results.tables import format_table
from fedhdp.simulation import simulate

population, model = handwriting(clients=2000), mlp()

# Clients chose: 100 opted out of privacy, 1,900 want noise 1.5 and count for a hundredth each on the server.
opted_out = PrivacyGroup("opted out", 100, noise_multiplier=0.0, sampling_rate=0.05)
private = PrivacyGroup("private", 1900, noise_multiplier=1.5, sampling_rate=0.05, weight=0.01)
chosen = Mechanism((opted_out, private), clip=AdaptiveClip(initial=0.5))

training = LocalTraining(epochs=25, batch_size=20, learning_rate=0.5, decay=0.9, decay_every=50)
table = []
for algorithm in (non_private, dp_fedavg, hdp_fedavg, fedhdp):
    trained = simulate(population, model, algorithm(chosen), training, rounds=200)
    table.append(trained.result(algorithm.__name__, delta=1e-4))
print(format_table(table))
