//go:build vm

package cocoond_test

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"cocoonstack.io/cocoon/internal/testkit/loopdev"
)

// disks gives two containers a block device of the node, and the files of an image.
func (c *criClient) disks(sandbox string, p *cri.PodSandboxConfig) {
	c.t.Helper()
	dev, link := loopdev.New(c.t, 64<<20), filepath.Join(c.dir, "claim")
	if err := os.Symlink(dev, link); err != nil { // as a kubelet has it
		c.t.Fatal(err)
	}
	config := func(name string) *cri.ContainerConfig {
		return &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: demo}, Command: []string{"sleep", "100000"}, LogPath: name + "/0.log", Linux: &cri.LinuxContainerConfig{},
			Devices: []*cri.Device{{HostPath: link, ContainerPath: "/dev/data", Permissions: "mrw"}},
			Mounts: []*cri.Mount{
				{ContainerPath: "/files", Image: &cri.ImageSpec{Image: demo}, Readonly: true},
				{ContainerPath: "/part", Image: &cri.ImageSpec{Image: demo}, ImageSubPath: "bin", Readonly: true},
			},
		}
	}
	create := func(config *cri.ContainerConfig) (string, error) {
		r, err := c.CreateContainer(c.t.Context(), &cri.CreateContainerRequest{PodSandboxId: sandbox, Config: config, SandboxConfig: p})
		return r.GetContainerId(), err
	}
	absent, other := config("absent"), config("other")
	absent.Mounts[1].ImageSubPath = "no/such"
	other.Devices[0].HostPath = "/dev/null"
	for want, bad := range map[codes.Code]*cri.ContainerConfig{codes.NotFound: absent, codes.InvalidArgument: other} {
		if _, err := create(bad); status.Code(err) != want {
			c.t.Errorf("%s: %v, want %s", bad.GetMetadata().GetName(), err, want)
		}
	}
	var ids []string
	for _, name := range []string{"one", "two"} {
		id, err := create(config(name))
		if err != nil {
			c.t.Fatal(err)
		}
		c.begin(id)
		ids = append(ids, id)
	}
	sh := func(id, script string) string {
		c.t.Helper()
		out, err := c.sync(id, 60, "sh", "-c", script)
		if err != nil {
			c.t.Fatalf("%s: %v", script, err)
		}
		return strings.TrimSpace(string(out.GetStdout()))
	}
	if got := sh(ids[0], "test -e /part/busybox && test -e /files/bin/busybox && echo there; touch /files/new 2>/dev/null && echo written; /part/busybox true 2>/dev/null && echo run"); got != "there" {
		c.t.Errorf("the files of the image: %q", got)
	}
	sh(ids[0], "echo from one >/dev/data && sync")
	if got := sh(ids[1], "head -c 8 /dev/data"); got != "from one" {
		c.t.Errorf("the other container reads %q", got)
	}
	for _, id := range ids {
		if _, err := c.RemoveContainer(c.t.Context(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
			c.t.Fatal(err)
		}
	}
	b, err := os.ReadFile(dev)
	if err != nil || !bytes.HasPrefix(b, []byte("from one\n")) {
		c.t.Errorf("the device of the node has %q: %v", b[:min(len(b), 16)], err)
	}
}
