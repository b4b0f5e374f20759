from raypo.cluster.gpus import gpu_of
from raypo.cluster.hardware import GB, Node
from raypo.cluster.resources import describe


def test_a_node_by_its_ray_resources():
    resources = {
        "CPU": 96.0,
        "GPU": 8.0,
        "accelerator_type:H100": 1.0,
        "memory": 700.0 * GB,
        "object_store_memory": 300.0 * GB,
        "node:10.0.0.1": 1.0,
    }
    assert describe("node 0", resources) == Node(
        "node 0", 8, 80 * GB, 96, 1000 * GB, gpu=gpu_of("H100")
    )


def test_memory_of_an_unknown_accelerator_is_not_made_up():
    node = describe("node 0", {"CPU": 4.0, "GPU": 1.0, "accelerator_type:X1": 1.0})
    assert (node.gpus, node.gpu_bytes, node.ram_bytes) == (1, None, None)
