// The reductions of sampling over shapes with tails, on one thread and on several, which must agree to the bit.
//
// Compiled with sanitizers, with the kernels in it. Whether results are right is tested elsewhere.
#include "sampling.h"

#include "operands.h"

namespace {

constexpr int NUM_TEAMS = 2;
Team teams[NUM_TEAMS] = {Team(1), Team(3)};

struct Filters {
    float temperature;
    int64_t top_k;
    float top_p, min_p;
};

constexpr Filters FILTERS[] = {
    {0, 0, 1, 0},   {0.8f, 0, 1, 0},     {1, 1, 1, 0},      {1e-5f, 7, 0.9f, 0},
    {1, 40, 1, 0},  {2, 0, 0.9f, 0},     {1, 0, 1e-6f, 0},  {1, 0, 1, 0.2f},
    {1, 700, 1, 0}, {3e38f, 9, 0.5f, 0}, {1, 0, 0.5f, 1.0f}};
constexpr int64_t NUM_FILTERS = sizeof(FILTERS) / sizeof(FILTERS[0]);

// Rows of numbers, of equal ones, with impossible tokens, and with what is no number or infinite.
std::unique_ptr<Fenced<float>> make_logits(int64_t num_rows, int64_t size) {
    const float infinity = std::numeric_limits<float>::infinity();
    auto logits = random_values<float>(num_rows * size);
    for (int64_t row = 0; row < num_rows; row++)
        for (int64_t i = 0; i < size; i++) {
            float& logit = (*logits)[row * size + i];
            logit = row % 7 == 1 ? 0 : logit * 20;
            if (row % 7 == 2 && i % 3) logit = -infinity;
            if (row % 7 == 3) logit = -infinity;
            if (row % 7 == 4 && i % 5 == 2) logit = std::numeric_limits<float>::quiet_NaN();
            if (row % 7 == 5 && i == size / 2) logit = infinity;
        }
    return logits;
}

template <class T, class Make>
std::unique_ptr<Fenced<T>> column(int64_t num_rows, Make make) {
    auto values = std::make_unique<Fenced<T>>(num_rows);
    for (int64_t row = 0; row < num_rows; row++) (*values)[row] = (T)make(row);
    return values;
}

void choose_all(Fenced<float>& logits, int64_t num_rows, int64_t size) {
    // Each kind of row meets each filter.
    auto of = [](int64_t row) { return FILTERS[row / 7 % NUM_FILTERS]; };
    auto temperatures = column<float>(num_rows, [&](int64_t row) { return of(row).temperature; });
    auto top_k = column<int64_t>(num_rows, [&](int64_t row) { return of(row).top_k; });
    auto top_p = column<float>(num_rows, [&](int64_t row) { return of(row).top_p; });
    auto min_p = column<float>(num_rows, [&](int64_t row) { return of(row).min_p; });
    auto seeds = column<int64_t>(num_rows, [&](int64_t row) { return INT64_MIN + row * 977; });
    auto places = column<int64_t>(num_rows, [&](int64_t row) { return row; });
    std::unique_ptr<Fenced<int64_t>> token_ids[NUM_TEAMS];
    for (int team = 0; team < NUM_TEAMS; team++) {
        token_ids[team] = std::make_unique<Fenced<int64_t>>(num_rows);
        const Choices choices{logits.data(),  num_rows,      size,           temperatures->data(),
                              top_k->data(),  top_p->data(), min_p->data(),  seeds->data(),
                              places->data(), places->data(), token_ids[team]->data()};
        choose(teams[team], choices);
        CHECK(token_ids[team]->equals(*token_ids[0]));
        for (int64_t row = 0; row < num_rows; row++)
            CHECK((*token_ids[team])[row] >= -1 && (*token_ids[team])[row] < size);
    }
}

void tell_all(Fenced<float>& logits, int64_t num_rows, int64_t size, int64_t num_best, bool of_tokens) {
    auto rows = column<int64_t>(num_rows, [&](int64_t row) { return num_rows - 1 - row; });
    auto token_ids = column<int64_t>(num_rows, [&](int64_t row) { return row * 31 % size; });
    const int64_t width = num_best + of_tokens;
    std::unique_ptr<Fenced<int64_t>> candidates[NUM_TEAMS], ranks[NUM_TEAMS];
    std::unique_ptr<Fenced<float>> logprobs[NUM_TEAMS];
    for (int team = 0; team < NUM_TEAMS; team++) {
        candidates[team] = std::make_unique<Fenced<int64_t>>(num_rows * width);
        logprobs[team] = std::make_unique<Fenced<float>>(num_rows * width);
        ranks[team] = std::make_unique<Fenced<int64_t>>(of_tokens ? num_rows : 0);
        const TokenLogprobs wanted{logits.data(), size, num_rows, rows->data(), of_tokens ? token_ids->data() : nullptr,
                                   num_best, candidates[team]->data(), logprobs[team]->data(), ranks[team]->data()};
        token_logprobs(teams[team], wanted);
        CHECK(candidates[team]->equals(*candidates[0]));
        CHECK(logprobs[team]->equals(*logprobs[0]));
        CHECK(ranks[team]->equals(*ranks[0]));
    }
}

void run_all(int64_t num_rows, int64_t size) {
    auto logits = make_logits(num_rows, size);
    Fenced<uint8_t> finite(num_rows);
    for (Team& team : teams) {
        find_finite_rows(team, logits->data(), num_rows, size, finite.data());
        for (int64_t row = 0; row < num_rows; row++) CHECK(finite[row] == (row % 7 < 2 || row % 7 == 6 || (row % 7 == 4 && size < 3)));
    }
    choose_all(*logits, num_rows, size);
    for (int64_t num_best : {(int64_t)0, std::min<int64_t>(size, 5), size})
        for (bool of_tokens : {false, true}) tell_all(*logits, num_rows, size, num_best, of_tokens);
}

}  // namespace

// An argument: a large vocabulary too.
int main(int count, char**) {
    for (int64_t size : {2, 7, 8, 9, 16, 17, 33, 511, 512, 513, 1023, 1025, 3001}) run_all(7 * NUM_FILTERS, size);
    run_all(1, 1500);
    if (count > 1) run_all(14, 152'064);
    puts("clean");
}
