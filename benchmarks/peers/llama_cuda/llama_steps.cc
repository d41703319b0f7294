// Times llama.cpp with the model of a GGUF file: prompts, and steps of decoding.
//
//   llama_steps MODEL NEW ROUNDS BATCHxPROMPT...
//
// Reads BATCH prompts of PROMPT random tokens each, then generates NEW tokens for each prompt. The
// greedy choice is the last operation of llama.cpp's graph, so only token ids come to the host.
// ROUNDS counts how often the steps are timed, from the same filled cache; a round before them is
// not counted. Prints one JSON object with a row for each cell. A row has the seconds until the
// first tokens, a figure for each of PREFILLS runs. It also has the mean seconds of a step, a
// figure for each round.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "ggml-backend.h"
#include "llama.h"

namespace {

using Tokens = std::vector<llama_token>;

constexpr int kPrefills = 2;
constexpr int kTokensAtOnce = 2048;  // tokens of a prompt that one graph computes

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "llama_steps: %s\n", message.c_str());
  std::exit(1);
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void LogErrors(ggml_log_level level, const char* text, void*) {
  if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
}

// A context for `rows` sequences, and what it needs.
class Session {
 public:
  Session(llama_model* model, int rows, int prompt, int length) : rows_(rows) {
    samplers_.resize(rows);
    for (int row = 0; row < rows; ++row) {
      samplers_[row] = {row, llama_sampler_chain_init(llama_sampler_chain_default_params())};
      llama_sampler_chain_add(samplers_[row].sampler, llama_sampler_init_greedy());
    }
    llama_context_params params = llama_context_default_params();
    params.n_ctx = rows * ((length + 255) / 256 * 256);
    params.n_batch = rows * prompt;
    params.n_ubatch = std::min(rows * prompt, kTokensAtOnce);
    params.n_seq_max = params.n_outputs_max = rows;
    params.n_outputs_max_per_seq = 1;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
    params.samplers = samplers_.data();
    params.n_samplers = samplers_.size();
    context_ = llama_init_from_model(model, params);
    if (!context_) Fail("llama.cpp could not make a context");
    batch_ = llama_batch_init(rows * prompt, 0, 1);
  }

  ~Session() {
    llama_batch_free(batch_);
    llama_free(context_);
    for (auto& each : samplers_) llama_sampler_free(each.sampler);
  }

  // Appends `tokens`, as many for each row, at `position`, and returns the next token of each row.
  Tokens Append(const Tokens& tokens, int position) {
    const int each = tokens.size() / rows_;
    batch_.n_tokens = tokens.size();
    for (int i = 0; i < batch_.n_tokens; ++i) {
      batch_.token[i] = tokens[i];
      batch_.pos[i] = position + i % each;
      batch_.n_seq_id[i] = 1;
      batch_.seq_id[i][0] = i / each;
      batch_.logits[i] = i % each == each - 1;
    }
    if (llama_decode(context_, batch_)) Fail("llama_decode failed");
    Tokens next(rows_);
    for (int row = 0; row < rows_; ++row) {
      next[row] = llama_get_sampled_token_ith(context_, (row + 1) * each - 1);
      if (next[row] == LLAMA_TOKEN_NULL) Fail("the graph of llama.cpp chose no token");
    }
    return next;
  }

  // Forgets all tokens from `position` on. False if llama.cpp cannot, because the model has a
  // recurrent state that has read them.
  bool Cut(int position) {
    bool done = true;
    for (int row = 0; row < rows_; ++row) {
      done &= llama_memory_seq_rm(llama_get_memory(context_), row, position, -1);
    }
    return done;
  }

 private:
  int rows_;
  std::vector<llama_sampler_seq_config> samplers_;
  llama_context* context_;
  llama_batch batch_;
};

void Print(const char* name, const std::vector<double>& seconds) {
  std::printf(", \"%s\": [", name);
  for (size_t i = 0; i < seconds.size(); ++i) std::printf("%s%.9f", i ? ", " : "", seconds[i]);
  std::printf("]");
}

void TimeCell(llama_model* model, int rows, int prompt, int new_tokens, int rounds) {
  Session session(model, rows, prompt, prompt + new_tokens);
  std::mt19937 random(rows);
  Tokens prompts(rows * prompt), first;
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  for (auto& token : prompts) token = random() % vocabulary;
  std::vector<double> prefills, steps;
  for (int run = 0; run <= kPrefills; ++run) {
    session.Cut(0);
    const double start = Now();
    first = session.Append(prompts, 0);
    if (run) prefills.push_back(Now() - start);
  }
  for (int round = 0; round <= rounds && new_tokens > 1; ++round) {
    if (!session.Cut(prompt)) {
      session.Cut(0);
      session.Append(prompts, 0);
    }
    Tokens tokens = first;
    const double start = Now();
    for (int step = 1; step < new_tokens; ++step)
      tokens = session.Append(tokens, prompt + step - 1);
    if (round) steps.push_back((Now() - start) / (new_tokens - 1));
  }
  std::printf("{\"batch\": %d, \"prompt\": %d", rows, prompt);
  Print("first_token_s", prefills);
  Print("step_s", steps);
  std::printf("}");
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 5) Fail("usage: llama_steps MODEL NEW ROUNDS BATCHxPROMPT...");
  llama_log_set(LogErrors, nullptr);
  llama_backend_init();
  llama_model* model = llama_model_load_from_file(argv[1], llama_model_default_params());
  if (!model) Fail("llama.cpp could not load the model");
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU);
  std::printf("{\"device\": \"%s\", \"rows\": [",
              device ? ggml_backend_dev_description(device) : "CPU");
  for (int i = 4; i < argc; ++i) {
    int rows = 0, prompt = 0;
    if (std::sscanf(argv[i], "%dx%d", &rows, &prompt) != 2)
      Fail("not a cell: " + std::string(argv[i]));
    if (i > 4) std::printf(", ");
    TimeCell(model, rows, prompt, std::atoi(argv[2]), std::atoi(argv[3]));
  }
  std::printf("]}\n");
  llama_model_free(model);
}
