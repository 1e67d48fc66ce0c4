"""The vLLM code that the shim replaces or relies on, by the fingerprint of its source.

`python -m stepgraph.interop.vllm.known` prints the fingerprints of the vLLM that is installed.
"""

from __future__ import annotations

_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_BASE = "vllm.v1.attention.backends.mamba_attn"
_BUILDER = f"{_BASE}:BaseMambaAttentionMetadataBuilder"
_MAMBA2 = "vllm.v1.attention.backends.mamba2_attn"

# version: {what: fingerprint}. A version is known if every entry of one of these agrees.
V1: dict[str, dict[str, str]] = {
    "0.32.0": {
        f"{_RUNNER}._build_attention_metadata": "16d0710a65636081",
        f"{_RUNNER}._get_encoder_seq_lens": "57cdf2cb70aa67c2",
        f"{_BASE}:BaseMambaAttentionMetadata": "e05323c408a2588f",
        f"{_BUILDER}.__init__": "930fdbf9c276d2d6",
        f"{_BUILDER}._compute_common_metadata": "ea6662bf18910d0e",
        f"{_BUILDER}._update_metadata_for_cudagraph_capture": "be4c0289bc87cbc7",
        f"{_BUILDER}.update_block_table": "3c884924d70fd056",
        f"{_MAMBA2}:Mamba2AttentionMetadata": "e041d6783e197065",
        f"{_MAMBA2}:Mamba2AttentionMetadataBuilder": "f920eb72c218f52f",
        "vllm.v1.attention.backend:CommonAttentionMetadata": "2137d945b2b2149c",
        "vllm.v1.attention.backends.utils:mamba_get_block_table_tensor": "026af4a8263ab533",
        "vllm.v1.attention.backends.utils:split_decodes_and_prefills": "14e58810107e2d10",
        "vllm.v1.worker.block_table:BlockTable.get_device_tensor": "495fa290462b31a4",
        "vllm.v1.worker.block_table:BlockTable.get_numpy_array": "e5a95331e8dec3de",
        "vllm.v1.worker.block_table:MultiGroupBlockTable.__getitem__": "1c36cd3715990188",
        "vllm.v1.worker.utils:AttentionGroup": "a7e7e7ec748f4a30",
    },
}


if __name__ == "__main__":
    from .fingerprint import of, resolve

    for name in next(iter(V1.values())):
        print(f'"{name}": "{of(resolve(name))}",')
