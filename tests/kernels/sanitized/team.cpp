// Teams under load: thousands of short phases, shares that must be taken from others, ends while others sleep.
//
// Units write to memory that no lock guards: a unit that two threads run, a phase that begins before all units of the
// one before it are done, or a run that returns too soon is a race, which the sanitizer of threads tells.
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "team.h"

namespace {

#define CHECK(holds)                                                        \
    do {                                                                    \
        if (!(holds)) {                                                     \
            fprintf(stderr, "%s:%d: not %s\n", __FILE__, __LINE__, #holds); \
            abort();                                                        \
        }                                                                   \
    } while (0)

// Each unit of a phase reads what the phase before it wrote, wherever it was written.
class Counting : public Work {
   public:
    Counting(std::vector<int64_t> sizes, int64_t at_once, int num_threads)
        : sizes_(std::move(sizes)), at_once_(at_once), runs_of_(num_threads) {
        const int64_t most = *std::max_element(sizes_.begin(), sizes_.end());
        for (auto& values : values_) values.assign(most, 0);
    }

    int num_phases() const override { return (int)sizes_.size(); }
    int64_t num_units(int phase) override {
        CHECK(phase == num_asked_++);
        return sizes_[phase];
    }
    int64_t units_at_once(int) override { return at_once_; }

    void run(int phase, int64_t begin, int64_t end, int thread) override {
        CHECK(end - begin <= at_once_ || runs_of_.size() == 1);
        const auto& before = values_[(phase + 1) % 2];
        auto& now = values_[phase % 2];
        const int64_t size = (int64_t)before.size();
        for (int64_t unit = begin; unit < end; unit++) {
            // The first share is slow: others must come to its help.
            if (unit < size / 8)
                for (volatile int i = 0; i < 500; i = i + 1) {}
            now[unit] = before[size - 1 - unit] + phase + 1;
        }
        runs_of_[thread].value += end - begin;
    }

    void begin_again() { num_asked_ = 0; }
    int64_t num_run() const {
        int64_t sum = 0;
        for (const auto& runs : runs_of_) sum += runs.value;
        return sum;
    }

   private:
    struct alignas(64) Count {
        int64_t value = 0;
    };

    std::vector<int64_t> sizes_;
    int64_t at_once_;
    int num_asked_ = 0;
    std::vector<Count> runs_of_;
    std::vector<int64_t> values_[2];
};

void run_team(int num_threads, int num_rounds) {
    Team team(num_threads);
    CHECK(team.num_threads() == num_threads);
    for (int64_t at_once : {1, 3, 64}) {
        const std::vector<int64_t> sizes = {1, 0, 40, 2, 100, 0, 7, 33, 1, 64};
        Counting work(sizes, at_once, num_threads);
        int64_t units = 0;
        for (int64_t size : sizes) units += size;
        for (int round = 0; round < num_rounds; round++) {
            work.begin_again();
            team.run(work);
            CHECK(work.num_run() == units * (round + 1));
        }
    }
    Counting nothing({0, 0}, 1, num_threads);
    team.run(nothing);
    CHECK(nothing.num_run() == 0);
}

// Threads that wait, that sleep, and that have hardly begun.
void end_teams(int num_threads) {
    { Team team(num_threads); }
    for (int microseconds : {0, 100, 20000}) {
        Team team(num_threads);
        Counting work({30, 5}, 2, num_threads);
        for (int round = 0; round < 3; round++) {
            work.begin_again();
            team.run(work);
            usleep(microseconds);
        }
    }
}

}  // namespace

// The argument: how often each team runs each work.
int main(int count, char** arguments) {
    const int num_rounds = count > 1 ? atoi(arguments[1]) : 20;
    for (int num_threads = 1; num_threads <= 8; num_threads++) {
        run_team(num_threads, num_rounds);
        end_teams(num_threads);
    }
    puts("clean");
}
