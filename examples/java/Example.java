import dev.blockyard.common.v1.SamplingParams;
import dev.blockyard.common.v1.StopCriteria;
import dev.blockyard.inference.v1.GenerationEvent;
import dev.blockyard.inference.v1.GenerationSpec;
import dev.blockyard.inference.v1.InferenceServiceGrpc;
import dev.blockyard.inference.v1.ListModelsRequest;
import dev.blockyard.inference.v1.Model;
import dev.blockyard.inference.v1.OnDisconnect;
import dev.blockyard.inference.v1.Position;
import dev.blockyard.inference.v1.ResumeGenerateRequest;
import dev.blockyard.inference.v1.StreamGenerateRequest;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.util.concurrent.TimeUnit;

/**
 * Streams a text from a gateway through gRPC, with the protos and nothing else of ours.
 *
 * <p>A connection that breaks costs a pause: the request was sent with ON_DISCONNECT_KEEP, and ResumeGenerate gives
 * exactly what has not come yet.
 */
public final class Example {
    private static final int MAX_RESUMES = 30;

    private final InferenceServiceGrpc.InferenceServiceBlockingStub stub;
    private String requestId = "";
    private long seed;
    private Position position = Position.getDefaultInstance();

    private Example(ManagedChannel channel) {
        stub = InferenceServiceGrpc.newBlockingStub(channel);
    }

    private void listModels() {
        var response = stub.withDeadlineAfter(10, TimeUnit.SECONDS).listModels(ListModelsRequest.getDefaultInstance());
        for (Model model : response.getModelsList()) {
            System.out.printf("%s: up to %d tokens%n", model.getName(), model.getMaxModelLen());
        }
    }

    private void stream(GenerationSpec spec) throws InterruptedException {
        System.out.print(spec.getText());
        for (int numResumes = 0; ; numResumes++) {
            try {
                if (requestId.isEmpty()) {
                    var request = StreamGenerateRequest.newBuilder().setSpec(spec).build();
                    stub.streamGenerate(request).forEachRemaining(response -> take(response.getEvent()));
                } else {
                    stub.resumeGenerate(resumption(spec)).forEachRemaining(response -> take(response.getEvent()));
                }
                return;
            } catch (StatusRuntimeException error) {
                boolean isLost = error.getStatus().getCode() == Status.Code.UNAVAILABLE;
                if (!isLost || requestId.isEmpty() || numResumes == MAX_RESUMES) {
                    throw error;
                }
                Thread.sleep(500);
            }
        }
    }

    /** With the request itself, also one that nobody remembers is gone on with. */
    private ResumeGenerateRequest resumption(GenerationSpec spec) {
        var request = ResumeGenerateRequest.newBuilder().setRequestId(requestId).addPositions(position);
        return request.setSpec(spec).setSeed(seed).build();
    }

    private void take(GenerationEvent event) {
        switch (event.getEventCase()) {
            case ACCEPTED -> {
                requestId = event.getAccepted().getRequestId();
                seed = event.getAccepted().getSeed();
            }
            case DELTA -> {
                var delta = event.getDelta();
                System.out.print(delta.getText());
                System.out.flush();
                position = Position.newBuilder().setNumTokens(delta.getNumTokens())
                    .setNumTextBytes(delta.getNumTextBytes()).build();
            }
            case FINISHED -> {
                var usage = event.getFinished().getUsage();
                System.out.printf("%n%n%s: %d tokens in, %d out%n", event.getFinished().getReason(),
                    usage.getNumPromptTokens(), usage.getNumCompletionTokens());
            }
            default -> { }
        }
    }

    public static void main(String[] arguments) throws InterruptedException {
        String address = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
        var spec = GenerationSpec.newBuilder()
            .setText(arguments.length > 1 ? arguments[1] : "def read_lines(path):\n")
            .setSampling(SamplingParams.newBuilder().setTemperature(0))
            .setStop(StopCriteria.newBuilder().setMaxTokens(40))
            .setOnDisconnect(OnDisconnect.ON_DISCONNECT_KEEP)
            .build();
        ManagedChannel channel = ManagedChannelBuilder.forTarget(address).usePlaintext().build();
        try {
            var example = new Example(channel);
            example.listModels();
            example.stream(spec);
        } catch (StatusRuntimeException error) {
            System.err.println(error.getMessage());
            System.exit(1);
        } finally {
            channel.shutdownNow();
        }
    }
}
