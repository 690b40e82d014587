"""What benchmarks/throughput.py runs beside the system."""

import pytest

from benchmarks import throughput
from benchmarks.kit import models

RECIPE = models.Recipe(32, 2, 4, 2, 48, 320, tied=True, qkv_bias=False)


@pytest.mark.timeout(60)
def test_onednn_is_measured_in_a_process_of_its_own(tmp_path):
    folder = models.write_model(RECIPE, tmp_path / "tiny")
    rates = throughput.measure_onednn(throughput.parse(["--model", str(folder), "--num-threads", "1"]))
    assert 0 < rates["whole_layer"] <= rates["best_product"]
