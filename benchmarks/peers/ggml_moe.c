// Times the expert layer of ggml on NVFP4 weights: three mul_mat_id and a SiLU, as llama.cpp runs
// it.
//
//   ggml_moe HIDDEN INTERMEDIATE EXPERTS TOP_K LAYERS THREADS ROUNDS TOKENS...
//
// Prints one line "tokens microseconds" for each TOKENS: the best mean over LAYERS different
// layers, so that weights come from memory. ggml rounds activations to int8, so that the layer is
// not W4A16.
//
// Needs a ggml with GGML_TYPE_NVFP4 (0.25 or newer). benchmarks/cpu_moe.py compiles this file.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "ggml-cpu.h"
#include "ggml.h"

static double microseconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

// All experts have the same random matrix: quantizing is slow, and the speed of a layer does not
// depend on the values.
static struct ggml_tensor* random_experts(struct ggml_context* context, int k, int n, int experts) {
  struct ggml_tensor* w = ggml_new_tensor_3d(context, GGML_TYPE_NVFP4, k, n, experts);
  const size_t bytes = ggml_nbytes(w) / experts;
  float* values = malloc(sizeof(float) * k * n);
  for (int i = 0; i < k * n; i++) values[i] = ((float)rand() / RAND_MAX - 0.5f) * 0.1f;
  ggml_quantize_chunk(GGML_TYPE_NVFP4, values, w->data, 0, n, k, NULL);
  for (int e = 1; e < experts; e++) memcpy((char*)w->data + e * bytes, w->data, bytes);
  free(values);
  return w;
}

static void random_routing(int32_t* ids, int tokens, int top_k, int experts) {
  for (int t = 0; t < tokens; t++) {
    char used[4096] = {0};
    for (int j = 0; j < top_k; j++) {
      int e = rand() % experts;
      while (used[e]) e = rand() % experts;
      used[e] = 1;
      ids[t * top_k + j] = e;
    }
  }
}

int main(int argc, char** argv) {
  if (argc < 9) return 1;
  const int hidden = atoi(argv[1]), intermediate = atoi(argv[2]), experts = atoi(argv[3]);
  const int top_k = atoi(argv[4]), layers = atoi(argv[5]), threads = atoi(argv[6]);
  const int rounds = atoi(argv[7]);
  const size_t layer_bytes = (size_t)3 * hidden * intermediate * experts * 9 / 16;
  struct ggml_init_params parameters = {layers * layer_bytes + ((size_t)3 << 30), NULL, false};
  struct ggml_context* context = ggml_init(parameters);
  struct ggml_tensor* weights[64][3];
  for (int l = 0; l < layers; l++) {
    weights[l][0] = random_experts(context, hidden, intermediate, experts);
    weights[l][1] = random_experts(context, hidden, intermediate, experts);
    weights[l][2] = random_experts(context, intermediate, hidden, experts);
  }
  for (int a = 8; a < argc; a++) {
    const int tokens = atoi(argv[a]);
    struct ggml_tensor* x = ggml_new_tensor_3d(context, GGML_TYPE_F32, hidden, 1, tokens);
    struct ggml_tensor* ids = ggml_new_tensor_2d(context, GGML_TYPE_I32, top_k, tokens);
    for (int i = 0; i < hidden * tokens; i++)
      ((float*)x->data)[i] = (float)rand() / RAND_MAX - 0.5f;
    struct ggml_cgraph* graphs[64];
    for (int l = 0; l < layers; l++) {
      struct ggml_tensor* gate = ggml_mul_mat_id(context, weights[l][0], x, ids);
      struct ggml_tensor* up = ggml_mul_mat_id(context, weights[l][1], x, ids);
      struct ggml_tensor* h = ggml_mul(context, ggml_silu(context, gate), up);
      graphs[l] = ggml_new_graph(context);
      ggml_build_forward_expand(graphs[l], ggml_mul_mat_id(context, weights[l][2], h, ids));
    }
    double best = 1e30;
    for (int round = 0; round <= rounds; round++) {
      double spent = 0;
      for (int l = 0; l < layers; l++) {
        random_routing(ids->data, tokens, top_k, experts);
        const double start = microseconds();
        ggml_graph_compute_with_ctx(context, graphs[l], threads);
        spent += microseconds() - start;
      }
      if (round && spent / layers < best) best = spent / layers;
    }
    printf("%d %.1f\n", tokens, best);
    fflush(stdout);
  }
  return 0;
}
