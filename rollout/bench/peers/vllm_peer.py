"""vLLM on the CPU, `LLM.generate` with `SamplingParams(n=n)`: its own OpenMP and tcmalloc preloaded, prefix caching on."""

import glob
import os
import sys
from pathlib import Path

SETTINGS = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "6",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def preload():
    """Start again with the libraries that vLLM wants loaded before everything else."""
    if "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return
    tcmalloc = glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4")
    openmp = [str(path) for path in [Path(sys.prefix) / "lib" / "libiomp5.so"] if path.exists()]
    for name, found in (("libtcmalloc_minimal.so.4 (Debian: libtcmalloc-minimal4)", tcmalloc), ("libiomp5.so", openmp)):
        if not found:
            print(f"vllm_peer: {name} is missing, vLLM will be slower than it could be", file=sys.stderr)
    cores = sorted(os.sched_getaffinity(0))
    binding = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "LD_PRELOAD": ":".join(tcmalloc + openmp)}
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **SETTINGS, **binding})


def start(setup):
    import vllm

    options = {}
    if setup["kv_tokens"]:
        options["num_gpu_blocks_override"] = setup["kv_tokens"] // setup["block_size"]
    llm = vllm.LLM(
        model=setup["model"], dtype=setup["dtype"], block_size=setup["block_size"], max_model_len=setup["context"],
        max_num_seqs=setup["max_num_seqs"], enable_prefix_caching=True, seed=0, **options,
    )  # fmt: skip

    def generate(prompts, n, new_tokens, seed):
        sampling = [
            vllm.SamplingParams(
                n=n, temperature=1.0, top_p=1.0, top_k=0, max_tokens=most, ignore_eos=True, detokenize=False, logprobs=0,
            )
            for most in (new_tokens if isinstance(new_tokens, list) else [new_tokens] * len(prompts))
        ]  # fmt: skip
        llm.reset_prefix_cache()
        made = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return sum(len(one.token_ids) for output in made for one in output.outputs)

    return vllm.__version__, generate


if __name__ == "__main__":
    preload()
    from lines import serve

    serve(start)
