// Streams a text from a gateway through gRPC, with the protos and nothing else of ours.
//
//     build/stream [ADDRESS] [PROMPT]
//
// A connection that breaks costs a pause: the request was sent with ON_DISCONNECT_KEEP, and ResumeGenerate gives
// exactly what has not come yet.

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <iostream>
#include <memory>
#include <string>
#include <thread>

#include "blockyard/inference/v1/inference.grpc.pb.h"

namespace inference = blockyard::inference::v1;

constexpr int MAX_RESUMES = 30;

class Example {
   public:
    explicit Example(const std::string& address)
        : stub_(inference::InferenceService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()))) {}

    grpc::Status list_models() {
        grpc::ClientContext context;
        context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
        inference::ListModelsResponse response;
        const grpc::Status status = stub_->ListModels(&context, {}, &response);
        for (const auto& model : response.models())
            std::cout << model.name() << ": up to " << model.max_model_len() << " tokens\n";
        return status;
    }

    grpc::Status stream(const inference::GenerationSpec& spec) {
        std::cout << spec.text();
        grpc::ClientContext context;
        inference::StreamGenerateRequest request;
        *request.mutable_spec() = spec;
        grpc::Status status = read<inference::StreamGenerateResponse>(*stub_->StreamGenerate(&context, request));
        for (int i = 0; i < MAX_RESUMES && status.error_code() == grpc::UNAVAILABLE && !id_.empty(); i++) {
            std::this_thread::sleep_for(std::chrono::milliseconds(500));
            status = resume(spec);
        }
        return status;
    }

   private:
    grpc::Status resume(const inference::GenerationSpec& spec) {
        grpc::ClientContext context;
        inference::ResumeGenerateRequest request;
        request.set_request_id(id_);
        *request.add_positions() = position_;
        // With the request itself, also one that nobody remembers is gone on with.
        *request.mutable_spec() = spec;
        request.set_seed(seed_);
        return read<inference::ResumeGenerateResponse>(*stub_->ResumeGenerate(&context, request));
    }

    template <class Response>
    grpc::Status read(grpc::ClientReader<Response>& reader) {
        for (Response response; reader.Read(&response);) take(response.event());
        return reader.Finish();
    }

    void take(const inference::GenerationEvent& event) {
        if (event.has_accepted()) {
            id_ = event.accepted().request_id();
            seed_ = event.accepted().seed();
        } else if (event.has_delta()) {
            std::cout << event.delta().text() << std::flush;
            position_.set_num_tokens(event.delta().num_tokens());
            position_.set_num_text_bytes(event.delta().num_text_bytes());
        } else if (event.has_finished()) {
            const auto& finished = event.finished();
            std::cout << "\n\n" << blockyard::common::v1::FinishReason_Name(finished.reason()) << ": "
                      << finished.usage().num_prompt_tokens() << " tokens in, "
                      << finished.usage().num_completion_tokens() << " out\n";
        }
    }

    std::unique_ptr<inference::InferenceService::Stub> stub_;
    std::string id_;
    uint64_t seed_ = 0;
    inference::Position position_;
};

int main(int num_arguments, char** arguments) {
    inference::GenerationSpec spec;
    spec.set_text(num_arguments > 2 ? arguments[2] : "def read_lines(path):\n");
    spec.mutable_sampling()->set_temperature(0);
    spec.mutable_stop()->set_max_tokens(40);
    spec.set_on_disconnect(inference::ON_DISCONNECT_KEEP);

    Example example(num_arguments > 1 ? arguments[1] : "127.0.0.1:50051");
    grpc::Status status = example.list_models();
    if (status.ok()) status = example.stream(spec);
    if (!status.ok()) std::cerr << "\nerror " << status.error_code() << ": " << status.error_message() << "\n";
    return !status.ok();
}
