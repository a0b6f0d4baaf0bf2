// Functions of llama.cpp's src/llama-ext.h, which is installed with no library. They have C++ names.
// From libllama 1.0 on, llama.h declares them itself. If llama.h declares a function, this file's
// declaration is not used.
#ifndef LOCALLLM_STAGING_H
#define LOCALLLM_STAGING_H

void    llama_set_embeddings_nextn     (struct llama_context * ctx, bool value, bool masked);
float * llama_get_embeddings_nextn     (struct llama_context * ctx);
void    llama_set_nextn_layer_offset   (struct llama_context * ctx, int32_t offset);
void    llama_set_embeddings_layer_inp (struct llama_context * ctx, uint32_t layer_id, bool value);
float * llama_get_embeddings_layer_inp (struct llama_context * ctx, uint32_t layer_id);

#endif
