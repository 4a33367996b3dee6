package nodewire

import (
	"context"

	"google.golang.org/grpc/metadata"
)

// exitKey is in the metadata of a call of a process that ends after it.
const exitKey = "cocoon-then-exit"

// SendThenExit returns a context whose calls say that the process keeps its connection until it ends, soon after them.
func SendThenExit(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, exitKey, "1")
}

// TakeThenExit reports whether the caller said so.
func TakeThenExit(ctx context.Context) bool {
	return len(metadata.ValueFromIncomingContext(ctx, exitKey)) > 0
}
