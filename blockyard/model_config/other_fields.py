"""Lists the fields of config.json that no network uses: harmless ones, and ones refused if they matter.

Every name that transformers' configurations have is here or is read in `network` and `rotary`; a test compares them.
"""

from __future__ import annotations

from typing import Any

from blockyard.contract.sampling import NUMBERS

# Fields about a file's origin and purpose.
_BOOKKEEPING = """
    _name_or_path name_or_path _commit_hash transformers_version license tokenizer_class prefix
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    sentence_transformers sbert_ce_default_activation_function
"""
# Fields about a model's training, and about running it in other programs.
_TRAINING = """
    initializer_range attention_dropout hidden_dropout hidden_dropout_prob resid_pdrop embd_pdrop attn_pdrop dropout
    attention_probs_dropout_prob classifier_dropout qa_dropout seq_classif_dropout sinusoidal_pos_embds
    pretraining_tp use_cache gradient_checkpointing output_attentions output_hidden_states output_past return_dict
    use_return_dict torchscript use_bfloat16 chunk_size_feed_forward tie_last_hidden_states tf_legacy_loss
    attn_implementation _attn_implementation _attn_implementation_autoset experts_implementation
    _experts_implementation keys_to_ignore_at_inference output_router_logits router_aux_loss_coef router_jitter_noise
"""
# The gateway reads the end tokens. Defaults of generation are read from generation_config.json instead.
_GENERATION = """
    bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id decoder_start_token_id
    max_length max_new_tokens min_length min_new_tokens early_stopping max_time stop_strings do_sample num_beams
    num_beam_groups use_mamba_cache top_h typical_p epsilon_cutoff eta_cutoff
    diversity_penalty encoder_repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size bad_words_ids renormalize_logits forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens sequence_bias
    token_healing guidance_scale watermarking_config num_return_sequences output_scores output_logits
    return_dict_in_generate cache_implementation cache_config return_legacy_cache
"""
HARMLESS = NUMBERS.keys() | f"{_BOOKKEEPING} {_TRAINING} {_GENERATION}".split()

_OFF: tuple[Any, ...] = (False, 0)
_ONE: tuple[Any, ...] = (1,)
_NEVER: tuple[Any, ...] = ()
_EMPTY: tuple[Any, ...] = ([], {})

# Fields that change some network's results, and the values with which they do not; null is always allowed.
REFUSED: dict[str, tuple[Any, ...]] = {
    # Layers that differ from each other, and other models.
    **dict.fromkeys(("per_layer_config", "pruned_heads", "text_config", "vision_config", "audio_config"), _EMPTY),
    **dict.fromkeys(("no_rope_layers", "no_rope_layer_interval", "cla_share_factor", "num_kv_shared_layers"), _OFF),
    # Attention.
    "is_causal": (True,),
    "is_decoder": (True, False),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder", "alibi"), _OFF),
    **dict.fromkeys(("attention_chunk_size", "attn_logit_softcapping", "logit_cap", "clip_qkv"), _NEVER),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layernorm", "attn_temperature_tuning", "multi_query"), _OFF),
    **dict.fromkeys(("attention_multiplier", "query_pre_attn_scalar", "cross_attention_hidden_size"), _NEVER),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim", "attention_sinks", "use_sinks"), _OFF),
    **dict.fromkeys(("qkv_bias", "attention_out_bias", "use_bias", "add_bias_linear", "add_qkv_bias"), _OFF),
    **dict.fromkeys(("parallel_attn", "use_parallel_residual", "new_decoder_architecture"), _OFF),
    # Positions.
    **dict.fromkeys(("rotary_pct", "rotary_emb_fraction", "rope_pct", "rope_ratio"), _ONE),
    **dict.fromkeys(("rotary_dim", "qk_rope_head_dim", "rope_local_base_freq", "global_rope_theta"), _NEVER),
    **dict.fromkeys(("rope_interleave", "rope_interleaved", "use_mrope", "use_dynamic_ntk", "use_logn_attn"), _OFF),
    # Factors.
    **dict.fromkeys(("logit_scale", "logits_scaling", "logits_scale", "embedding_multiplier"), _ONE),
    **dict.fromkeys(("residual_multiplier", "lm_head_multiplier", "scale_emb", "scale_depth"), _ONE),
    **dict.fromkeys(("dim_model_base", "mup_width_multiplier", "mup_attn_multiplier"), _NEVER),
    **dict.fromkeys(("final_logit_softcapping", "output_logit_softcapping"), _NEVER),
    **dict.fromkeys(("use_mup", "lm_head_bias", "head_bias", "normalize_embedding"), _OFF),
    # Experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _OFF),
}
