"""transformers' continuous batching, `num_return_sequences=n`, in the best settings found: for a CPU those measured beforehand,
for a GPU those that are the fastest in a short run of such prompts, tried at the start."""

import random
import time

import torch
import transformers
from lines import serve

PAGE = 256
CPU = {"max_batch_tokens": 512, "max_requests_per_batch": 16}
REQUESTS = (32, 128, 1024)
"""in a batch, on a GPU: sdpa attends every query to the KV of the whole batch, so fewer at once may be faster"""
TRIAL_TOKENS = 16


def load(setup):
    """Weights of the folder, or random ones for its configuration. sdpa becomes flash attention where that is installed."""
    dtype, cuda = getattr(torch, setup["dtype"]), setup["device"] != "cpu"
    options = {"dtype": dtype, "attn_implementation": "sdpa" if cuda else "paged|eager"}
    if not setup["random_weights"]:
        return transformers.AutoModelForCausalLM.from_pretrained(setup["model"], **options).to(setup["device"]).eval()
    config = transformers.AutoConfig.from_pretrained(setup["model"])
    torch.manual_seed(0)
    with torch.device(setup["device"]):
        return transformers.AutoModelForCausalLM.from_config(config, **options).eval()


@torch.no_grad()
def run(model, prompts, n, new_tokens, seed, settings):
    """Run once. Returns (tokens made, seconds), without the time that the manager takes to start."""
    torch.manual_seed(seed)
    each = new_tokens if isinstance(new_tokens, list) else [new_tokens] * len(prompts)
    config = transformers.GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(each), eos_token_id=-1, pad_token_id=0,
        num_return_sequences=n,
    )  # fmt: skip
    pool = int((sum(map(len, prompts)) + n * sum(most + 2 * PAGE for most in each)) * 1.05)
    batching = transformers.ContinuousBatchingConfig(
        num_blocks=pool // PAGE, return_logprobs=True, seed=seed, cpu_offload_space=0.0,
        **{**settings, "max_requests_per_batch": min(settings["max_requests_per_batch"], len(prompts) * n)},
    )  # fmt: skip
    made = ended = 0
    with model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching, block=True, timeout=5
    ) as manager:
        started = time.perf_counter()
        if isinstance(new_tokens, list):
            for ids, most in zip(prompts, each, strict=True):
                manager.add_request(ids, max_new_tokens=most)
        else:
            manager.add_requests(inputs=prompts, max_new_tokens=new_tokens)
        while ended < len(prompts) * n:
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                break  # the caller counts
            if result is not None and result.is_finished():
                ended += 1
                made += len(result.generated_tokens)
        return made, time.perf_counter() - started


def fastest(model, prompts, n):
    """Return the settings that make the most tokens a second; those that fail drop out."""
    speeds = []

    def attempt(settings):
        try:
            made, seconds = run(model, prompts, n, TRIAL_TOKENS, 0, settings)
        except Exception as error:
            print(f"{settings}: {type(error).__name__}: {error}", flush=True)
            return
        print(f"{settings}: {made} tokens in {seconds:.2f} s", flush=True)
        if made == len(prompts) * n * TRIAL_TOKENS:
            speeds.append((made / seconds, len(speeds), settings))

    for requests in sorted({min(requests, len(prompts) * n) for requests in REQUESTS}):
        attempt({"max_requests_per_batch": requests, "max_batch_tokens": 2048})
    if speeds:
        attempt({**max(speeds)[2], "use_cuda_graph": True})
    if not speeds:
        raise SystemExit("transformers_cb: no settings work here")
    return max(speeds)[2]


def start(setup):
    if setup["threads"]:
        torch.set_num_threads(setup["threads"])
    model = load(setup)
    settings = {**CPU, "use_async_batching": False}
    if setup["device"] != "cpu":
        ids = random.Random(0)
        length, vocabulary = setup["prompt_tokens"], model.config.vocab_size
        prompts = [[ids.randrange(3, vocabulary) for _ in range(length)] for _ in range(setup["prompts"])]
        settings = fastest(model, prompts, setup["n"])

    def generate(prompts, n, new_tokens, seed):
        return run(model, prompts, n, new_tokens, seed, settings)

    attention = model.config._attn_implementation
    return f"{transformers.__version__} ({attention}, {settings})", generate


if __name__ == "__main__":
    serve(start)
