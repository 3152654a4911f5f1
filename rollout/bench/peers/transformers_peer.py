"""transformers, `generate(num_return_sequences=n)`: one static batch of everything, sdpa, log-probs from the scores."""

import torch
import transformers
from lines import serve


def start(setup):
    torch.set_num_threads(setup["threads"])
    options = {"dtype": getattr(torch, setup["dtype"]), "attn_implementation": "sdpa"}
    if setup["random_weights"]:
        torch.manual_seed(0)
        config = transformers.AutoConfig.from_pretrained(setup["model"])
        model = transformers.AutoModelForCausalLM.from_config(config, **options).eval()
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(setup["model"], **options).eval()

    def generate(prompts, n, new_tokens, seed):
        torch.manual_seed(seed)
        ids = torch.tensor(prompts)
        config = transformers.GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0,
            num_return_sequences=n, output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        with torch.inference_mode():
            made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
            drawn = made.sequences[:, ids.shape[1] :]
            for step, logits in enumerate(made.logits):
                logits.float().log_softmax(-1).gather(1, drawn[:, step : step + 1])
        return drawn.numel()

    return transformers.__version__, generate


if __name__ == "__main__":
    serve(start)
