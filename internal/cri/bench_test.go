package cri

import (
	"net"
	"path/filepath"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// BenchmarkPass is a call to a server, and the same call through the door.
func BenchmarkPass(b *testing.B) {
	direct := filepath.Join(b.TempDir(), "direct.sock")
	l, err := (&net.ListenConfig{}).Listen(b.Context(), "unix", direct)
	if err != nil {
		b.Fatal(err)
	}
	s := grpc.NewServer()
	cri.RegisterRuntimeServiceServer(s, old{})
	go s.Serve(l) //nolint:errcheck // Stop ends it
	b.Cleanup(s.Stop)
	conn, err := grpc.NewClient("unix:"+direct, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	door, _ := serveDoor(b, old{})
	for name, c := range map[string]cri.RuntimeServiceClient{"direct": cri.NewRuntimeServiceClient(conn), "door": door} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if _, err := c.PodSandboxStatus(b.Context(), &cri.PodSandboxStatusRequest{PodSandboxId: "c0ffee"}); err == nil {
					b.Fatal("it has an answer")
				}
			}
		})
	}
}
