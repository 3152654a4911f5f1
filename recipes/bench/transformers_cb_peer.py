"""transformers' continuous batching, `generate_batch(num_return_sequences=n)`, in the best settings found for a CPU."""

import torch
import transformers
from lines import serve


def start(setup):
    torch.set_num_threads(setup["threads"])
    dtype = getattr(torch, setup["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        setup["model"], dtype=dtype, attn_implementation="paged|eager"
    ).eval()

    def generate(prompts, n, new_tokens, seed):
        torch.manual_seed(seed)
        config = transformers.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0,
            num_return_sequences=n,
        )  # fmt: skip
        page = 256
        tokens = int((sum(map(len, prompts)) + len(prompts) * n * (new_tokens + 2 * page)) * 1.05)
        batching = transformers.ContinuousBatchingConfig(
            num_blocks=tokens // page, max_batch_tokens=512, max_requests_per_batch=16, return_logprobs=True, seed=seed,
            cpu_offload_space=0.0, use_async_batching=False,
        )  # fmt: skip
        made = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
        return sum(len(one.generated_tokens) for one in made.values())

    return transformers.__version__, generate


if __name__ == "__main__":
    serve(start)
