//go:build cri

package cri

import (
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/testkit/containerdtest"
)

// TestSandboxFigure prints how long RunPodSandbox takes for a VM and for a container, and how long the same CNI plugins take alone. The three take
// turns in one run. It judges nothing.
func TestSandboxFigure(t *testing.T) {
	const rounds = 15
	d := containerdtest.Start(t)
	o := openDoor(t, d)
	conn, err := grpc.NewClient("unix://"+o.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	client := cri.NewRuntimeServiceClient(conn)

	conf, err := filepath.Glob(filepath.Join(d.Networks, "*.conflist"))
	if err != nil || len(conf) != 1 {
		t.Fatalf("networks: %v, %v", conf, err)
	}
	list, err := libcni.ConfListFromFile(conf[0])
	if err != nil {
		t.Fatal(err)
	}
	plugins := libcni.NewCNIConfigWithCacheDir([]string{d.Plugins}, t.TempDir(), nil)
	bare := func(round int) time.Duration {
		t.Helper()
		name := fmt.Sprintf("figure-%d", round)
		if out, err := exec.CommandContext(t.Context(), "ip", "netns", "add", name).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		rt := &libcni.RuntimeConf{ContainerID: name, NetNS: "/run/netns/" + name, IfName: "eth0"}
		began := time.Now()
		_, err := plugins.AddNetworkList(t.Context(), list, rt)
		took := time.Since(began)
		if err == nil {
			err = plugins.DelNetworkList(t.Context(), list, rt)
		}
		if out, gone := exec.CommandContext(t.Context(), "ip", "netns", "del", name).CombinedOutput(); err != nil || gone != nil {
			t.Fatalf("%v, %v: %s", err, gone, out)
		}
		return took
	}
	sandbox := func(round int, handler string) time.Duration {
		t.Helper()
		name := fmt.Sprintf("figure-%s-%d", handler, round)
		began := time.Now()
		r, err := client.RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{RuntimeHandler: handler, Config: &cri.PodSandboxConfig{
			Metadata: &cri.PodSandboxMetadata{Name: name, Namespace: "default", Uid: name}, Linux: &cri.LinuxPodSandboxConfig{CgroupParent: "/k8s.io"},
		}})
		took := time.Since(began)
		if err == nil {
			_, err = client.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: r.GetPodSandboxId()})
		}
		if err == nil {
			_, err = client.RemovePodSandbox(t.Context(), &cri.RemovePodSandboxRequest{PodSandboxId: r.GetPodSandboxId()})
		}
		if err != nil {
			t.Fatal(err)
		}
		return took
	}
	kinds := []struct {
		what string
		run  func(round int) time.Duration
	}{
		{"CNI ADD alone", bare},
		{"RunPodSandbox of a VM", func(round int) time.Duration { return sandbox(round, "cocoon") }},
		{"RunPodSandbox of a container", func(round int) time.Duration { return sandbox(round, "runc") }},
	}
	took := make([][]time.Duration, len(kinds))
	for round := range rounds + 1 {
		for i, k := range kinds {
			if d := k.run(round); round > 0 { // the first one fetches the pause image
				took[i] = append(took[i], d)
			}
		}
	}
	for i, k := range kinds {
		slices.Sort(took[i])
		t.Logf("%-28s %v (median of %d; %v to %v), %.2f of the first", k.what, took[i][rounds/2].Round(100*time.Microsecond), rounds,
			took[i][0].Round(100*time.Microsecond), took[i][rounds-1].Round(100*time.Microsecond), float64(took[i][rounds/2])/float64(took[0][rounds/2]))
	}
}
