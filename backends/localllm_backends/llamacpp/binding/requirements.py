"""The names of llama.cpp that this package uses, by capability.

A library without one of a capability's names does not have that capability. Only decoding is
required. Functions may have several spellings in a library (cxx_names.py). Fields are written
`structure.field`. Fields that are not listed are set if they exist.
"""

from __future__ import annotations

from dataclasses import dataclass

from localllm_backends.llamacpp.binding.descriptions import WantedNames


@dataclass(frozen=True, slots=True)
class Capability:
    """A capability and the names that it needs.

    `library` exports the functions. `staging` are functions that were C++ before libllama 1.0.
    """

    title: str
    library: str = "llama"
    functions: tuple[str, ...] = ()
    staging: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    structures: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_VOCABULARY = """
    llama_model_get_vocab llama_vocab_n_tokens llama_vocab_get_attr llama_vocab_get_text
    llama_vocab_is_control llama_vocab_is_eog llama_vocab_get_add_bos llama_vocab_get_add_eos
    llama_vocab_bos llama_vocab_eos llama_vocab_eot llama_vocab_fim_pre llama_vocab_fim_suf
    llama_vocab_fim_mid llama_vocab_fim_pad llama_vocab_fim_rep llama_vocab_fim_sep
    llama_tokenize llama_token_to_piece llama_detokenize
"""
_GGUF = """
    gguf_init_from_file gguf_free gguf_find_key gguf_find_tensor gguf_get_kv_type gguf_get_arr_type
    gguf_get_arr_n gguf_get_val_str gguf_get_val_data gguf_get_arr_data
    gguf_get_n_tensors gguf_get_tensor_size gguf_get_tensor_offset gguf_get_data_offset
"""
_TENSORS = """
    ggml_init ggml_free ggml_new_tensor_2d ggml_new_tensor_3d ggml_set_rows
"""

_DECODING = Capability(
    "text generation",
    functions=_names(
        """
            llama_log_set llama_backend_init llama_model_default_params
            llama_model_load_from_file llama_model_free llama_model_meta_val_str
            llama_model_chat_template llama_model_has_encoder llama_model_has_decoder
            llama_model_is_recurrent llama_model_is_hybrid llama_model_n_ctx_train
            llama_model_n_embd llama_model_n_head llama_model_n_head_kv llama_model_n_layer
            llama_model_n_params llama_model_n_swa llama_model_size llama_max_devices
            llama_context_default_params llama_init_from_model llama_free llama_get_model
            llama_get_memory llama_n_ctx llama_n_batch llama_n_ubatch llama_n_seq_max
            llama_n_threads llama_set_n_threads llama_set_abort_callback llama_set_causal_attn
            llama_batch_get_one llama_decode llama_get_logits llama_synchronize
            llama_memory_clear llama_memory_seq_cp llama_memory_seq_rm llama_memory_seq_pos_min
            llama_memory_seq_pos_max
        """
        + _VOCABULARY
    ),
    fields=_names(
        """
            llama_model_params.n_gpu_layers llama_model_params.devices
            llama_model_params.tensor_buft_overrides llama_model_params.tensor_split
            llama_model_params.progress_callback llama_model_params.vocab_only
            llama_context_params.n_ctx llama_context_params.n_batch
            llama_context_params.n_ubatch llama_context_params.n_seq_max
            llama_context_params.n_threads llama_context_params.n_threads_batch
            llama_context_params.type_k llama_context_params.type_v
            llama_context_params.kv_unified llama_context_params.swa_full
            llama_context_params.offload_kqv llama_context_params.op_offload
            llama_context_params.cb_eval
        """
    ),
    structures=_names("llama_batch llama_model_tensor_buft_override"),
    types=_names(
        """
            llama_token llama_progress_callback ggml_log_callback ggml_abort_callback
            ggml_backend_sched_eval_callback
        """
    ),
    constants=_names(
        """
            LLAMA_TOKEN_ATTR_UNKNOWN LLAMA_TOKEN_ATTR_CONTROL LLAMA_TOKEN_ATTR_LSTRIP
            LLAMA_TOKEN_ATTR_USER_DEFINED GGML_TYPE_F32 GGML_TYPE_F16 GGML_TYPE_Q8_0
            GGML_LOG_LEVEL_ERROR GGML_LOG_LEVEL_CONT
        """
    ),
)
_DEVICES = Capability(
    "devices",
    functions=_names(
        """
            ggml_backend_register ggml_backend_dev_count ggml_backend_dev_get
            ggml_backend_dev_by_type ggml_backend_dev_type ggml_backend_dev_get_props
            ggml_backend_dev_buffer_type ggml_backend_dev_supports_op
            ggml_backend_dev_backend_reg ggml_backend_reg_name ggml_backend_reg_get_proc_address
            ggml_backend_buft_get_max_size
        """
        + _TENSORS
    ),
    structures=_names(
        """
            ggml_init_params ggml_backend_dev_props ggml_backend_feature
        """
    ),
    types=_names("ggml_backend_get_features_t"),
    constants=_names(
        """
            GGML_BACKEND_DEVICE_TYPE_CPU GGML_BACKEND_DEVICE_TYPE_GPU
            GGML_BACKEND_DEVICE_TYPE_IGPU GGML_TYPE_I64
        """
    ),
)
_STATES = Capability(
    "saving and restoring sequences",
    functions=_names(
        """
            llama_state_seq_get_size_ext llama_state_seq_get_data_ext
            llama_state_seq_set_data_ext
        """
    ),
    constants=_names("LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY LLAMA_STATE_SEQ_VERSION"),
)
_MTP = Capability(
    "drafting with a model's own heads (MTP)",
    functions=_names(
        """
            llama_model_n_layer_nextn llama_model_n_embd_out
        """
        + _GGUF
    ),
    staging=_names(
        """
            llama_set_embeddings_nextn llama_get_embeddings_nextn llama_set_nextn_layer_offset
        """
    ),
    fields=_names("llama_context_params.ctx_type"),
    structures=_names("gguf_init_params"),
    constants=_names("LLAMA_CONTEXT_TYPE_DEFAULT LLAMA_CONTEXT_TYPE_MTP"),
)
_DRAFTERS = Capability(
    "drafting with EAGLE-3, DFlash and assistants",
    functions=_names(
        """
            llama_model_n_embd_out llama_model_rope_type llama_encode
        """
        + _GGUF
    ),
    staging=_names(
        """
            llama_set_embeddings_nextn llama_get_embeddings_nextn
            llama_set_embeddings_layer_inp llama_get_embeddings_layer_inp
        """
    ),
    fields=_names("llama_context_params.ctx_other"),
    structures=_names("gguf_init_params"),
    constants=_names("LLAMA_ROPE_TYPE_MROPE"),
)
_ADAPTERS = Capability(
    "adapters (LoRA)",
    functions=_names("llama_adapter_lora_init llama_set_adapters_lora"),
)
_IMAGES = Capability(
    "images",
    library="mtmd",
    functions=_names(
        """
            mtmd_log_set mtmd_context_params_default mtmd_init_from_file mtmd_free
            mtmd_support_vision mtmd_decode_use_mrope mtmd_decode_use_non_causal
            mtmd_bitmap_init mtmd_bitmap_free mtmd_bitmap_set_id mtmd_tokenize_from_parts
            mtmd_input_chunks_init mtmd_input_chunks_free mtmd_input_chunks_size
            mtmd_input_chunks_get mtmd_input_chunk_get_type mtmd_input_chunk_get_tokens_text
            mtmd_input_chunk_get_tokens_image mtmd_input_chunk_get_id
            mtmd_input_chunk_get_n_tokens mtmd_input_chunk_get_n_pos
            mtmd_image_tokens_get_decoder_pos mtmd_encode_chunk mtmd_get_output_embd
            llama_model_n_embd_inp
        """
    ),
    fields=_names(
        """
            mtmd_context_params.use_gpu mtmd_context_params.n_threads
            mtmd_context_params.print_timings mtmd_context_params.warmup
        """
    ),
    structures=_names("mtmd_input_text mtmd_input_part"),
    constants=_names("MTMD_INPUT_CHUNK_TYPE_TEXT MTMD_INPUT_CHUNK_TYPE_IMAGE"),
)
_AUDIO = Capability(
    "audio",
    library="mtmd",
    functions=_names("mtmd_support_audio mtmd_get_audio_sample_rate mtmd_bitmap_init_from_audio"),
    constants=_names("MTMD_INPUT_CHUNK_TYPE_AUDIO"),
)
_EMBEDDINGS = Capability(
    "embeddings and reranking",
    functions=_names(
        """
            llama_pooling_type llama_get_embeddings_seq llama_model_n_embd_out
            llama_model_n_cls_out llama_model_cls_label llama_vocab_sep llama_vocab_get_add_sep
        """
    ),
    fields=_names(
        """
            llama_context_params.embeddings llama_context_params.pooling_type
        """
    ),
    constants=_names(
        """
            LLAMA_POOLING_TYPE_UNSPECIFIED LLAMA_POOLING_TYPE_MEAN LLAMA_POOLING_TYPE_CLS
            LLAMA_POOLING_TYPE_LAST LLAMA_POOLING_TYPE_RANK
        """
    ),
)
_DEVICE_SAMPLING = Capability(
    "selecting tokens on the device",
    functions=_names(
        """
            llama_set_sampler llama_sampler_init llama_sampler_free llama_sampler_init_top_k
            llama_sampler_chain_init llama_sampler_chain_default_params llama_sampler_chain_add
            llama_get_sampled_candidates_count_ith llama_get_sampled_candidates_ith
            llama_get_sampled_logits_ith llama_get_sampled_probs_ith ggml_nelements
            ggml_reshape_2d ggml_cont ggml_set_output ggml_soft_max ggml_get_rows
            ggml_backend_tensor_get
        """
    ),
    structures=_names("llama_sampler_i llama_sampler_data"),
)
_REWINDING = Capability(
    "rewinding recurrent models",
    functions=_names("llama_n_rs_seq"),
    fields=_names("llama_context_params.n_rs_seq"),
)
_RPC = Capability(
    "devices of other machines (RPC)",
    library="ggml-rpc",
    functions=_names("ggml_backend_rpc_add_server ggml_backend_rpc_start_server"),
)
_PRODUCTS = Capability(
    "measuring the processor",
    functions=_names(
        """
            ggml_type_name ggml_nbytes ggml_mul_mat ggml_mul_mat_id ggml_new_graph
            ggml_build_forward_expand ggml_backend_dev_init ggml_backend_graph_compute
            ggml_backend_alloc_ctx_tensors_from_buft ggml_backend_buffer_free
            ggml_backend_tensor_set
        """
        + _TENSORS
    ),
    structures=_names("ggml_init_params"),
    types=_names(
        """
            ggml_backend_set_n_threads_t ggml_backend_dev_get_extra_bufts_t
        """
    ),
    constants=_names("GGML_TYPE_I32 GGML_TYPE_COUNT"),
)
_EXPERT_CACHE = Capability(
    "the cache of experts on the device",
    fields=_names("llama_context_params.moe_cache_size"),
)
_QUANTISING = Capability(
    "quantising model files",
    functions=_names("llama_model_quantize llama_model_quantize_default_params"),
    fields=_names(
        """
            llama_model_quantize_params.ftype llama_model_quantize_params.nthread
            llama_model_quantize_params.allow_requantize
            llama_model_quantize_params.kv_overrides
        """
    ),
    structures=_names("llama_model_quantize_params llama_model_kv_override"),
    constants=_names("LLAMA_KV_OVERRIDE_TYPE_INT LLAMA_KV_OVERRIDE_TYPE_STR"),
)
_IMPORTANCE = Capability(
    "quantising with an importance matrix",
    functions=_names(
        """
            gguf_get_tensor_name gguf_get_tensor_type gguf_get_arr_str
        """
        + _GGUF
    ),
    fields=_names("llama_model_quantize_params.imatrix"),
    structures=_names("gguf_init_params llama_model_imatrix_data"),
    constants=_names("GGML_TYPE_F32"),
)

CAPABILITIES = {
    "decoding": _DECODING,
    "devices": _DEVICES,
    "states": _STATES,
    "mtp": _MTP,
    "drafters": _DRAFTERS,
    "adapters": _ADAPTERS,
    "images": _IMAGES,
    "audio": _AUDIO,
    "embeddings": _EMBEDDINGS,
    "device_sampling": _DEVICE_SAMPLING,
    "rewinding": _REWINDING,
    "rpc": _RPC,
    "products": _PRODUCTS,
    "expert_cache": _EXPERT_CACHE,
    "quantising": _QUANTISING,
    "importance": _IMPORTANCE,
}

# Names whose absence turns no capability off.
_OPTIONAL_FUNCTIONS = (
    "llama_version", "ggml_version", "ggml_backend_load_all", "ggml_backend_load_all_from_path",
)  # fmt: skip
_OPTIONAL_CONSTANTS = (
    "GGML_TYPE_*", "GGUF_TYPE_*", "LLAMA_LOAD_MODE_*", "LLAMA_LAZY_MODE_*",
    "LLAMA_STATE_SEQ_FLAGS_*", "LLAMA_FTYPE_*",
)  # fmt: skip


def wanted() -> WantedNames:
    """Return all names to read from the headers."""
    functions = dict.fromkeys(_OPTIONAL_FUNCTIONS)
    staging: dict[str, None] = {}
    structures: dict[str, None] = {}
    types: dict[str, None] = {}
    constants = dict.fromkeys(_OPTIONAL_CONSTANTS)
    for capability in CAPABILITIES.values():
        functions |= dict.fromkeys((*capability.functions, *capability.staging))
        staging |= dict.fromkeys(capability.staging)
        structures |= dict.fromkeys(capability.structures)
        types |= dict.fromkeys(capability.types)
        constants |= dict.fromkeys(capability.constants)
    return WantedNames(
        tuple(functions), tuple(staging), tuple(structures), tuple(types), tuple(constants)
    )
