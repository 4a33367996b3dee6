package storage

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/image"
	"cocoonstack.io/cocoon/internal/testkit/diff"
	"cocoonstack.io/cocoon/internal/vm"
	"cocoonstack.io/cocoon/internal/volume"
)

func withImage(name string) func(*corev1.PersistentVolumeClaim) {
	return func(c *corev1.PersistentVolumeClaim) { c.Annotations[contract.KeyVolumeImage] = name }
}

// read returns what is on a volume of the namespace team.
func (n *node) read(ref string) string {
	n.t.Helper()
	var b bytes.Buffer
	if err := n.store.Export(vm.OnBehalf(n.t.Context(), vm.Owner{Namespace: "team"}), ref, &b); err != nil {
		n.t.Fatal(err)
	}
	return string(bytes.TrimRight(b.Bytes(), "\x00"))
}

// event waits for an Event of a claim that contains text.
func (n *node) event(text string) {
	n.t.Helper()
	for {
		select {
		case e := <-n.events.Events:
			if strings.Contains(e, text) {
				return
			}
		case <-n.t.Context().Done():
			n.t.Fatalf("no Event with %q", text)
		}
	}
}

func TestVolumeFilledFromAnImage(t *testing.T) {
	n := prepare(t)
	var asked image.PullRequest
	var of vm.Owner
	fails := 1
	n.images = func(ctx context.Context, _ volume.Spec, from image.PullRequest) (io.Reader, error) {
		asked, of = from, vm.Behalf(ctx)
		if fails--; fails == 0 { // half of it has come
			return io.MultiReader(strings.NewReader("half"), failing{}), nil
		}
		return strings.NewReader("the disk"), nil
	}
	n.run()
	n.create(claim("system", "node-1", withImage("docker://registry.example/disk")))
	pv := n.volume("system")
	if got := n.read(pv.Spec.CSI.VolumeHandle); got != "the disk" {
		t.Errorf("on the volume is %q", got)
	}
	if d := diff.Of(image.PullRequest{Name: "docker://registry.example/disk", Policy: image.PullAlways}, asked); d != "" {
		t.Error(d)
	}
	if of.Namespace != "team" {
		t.Errorf("the image was pulled for %+v", of)
	}
	n.told("the server is gone")
	n.event("Filling the volume from image docker://registry.example/disk")
	n.event("Filled the volume")
	if all := n.kept("team"); len(all) != 1 {
		t.Errorf("the node has %+v", all)
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errdefs.Unavailablef("the server is gone") }

func TestImagesAreShownWithoutSecrets(t *testing.T) {
	for name, want := range map[string]string{
		"https://me:secret@example.org/disk.img?token=secret#secret": "https://example.org/disk.img", "docker://registry.example/disk:1": "docker://registry.example/disk:1",
		"registry.example:5000/disk@sha256:00": "registry.example:5000/disk@sha256:00", "cocoon/disk-demo:latest": "cocoon/disk-demo:latest",
	} {
		if got := show(name); got != want {
			t.Errorf("%s is shown as %s, want %s", name, got, want)
		}
	}
}

func TestPercent(t *testing.T) {
	for _, c := range []struct {
		g    image.Progress
		want int // -1: not known
	}{
		{image.Progress{Phase: image.PhaseDownload, Done: 0, Total: 1 << 30}, 0},
		{image.Progress{Phase: image.PhaseDownload, Done: 1 << 29, Total: 1 << 30}, 25},
		{image.Progress{Phase: image.PhaseDownload, Done: 1 << 31, Total: 1 << 30}, 50},
		{image.Progress{Phase: image.PhaseDownload, Done: 5, Total: -1}, -1},
		{image.Progress{Phase: image.PhaseUnpack, Done: 5, Total: 10}, -1},
		{image.Progress{Phase: image.PhaseFill, Done: -5, Total: 10}, 50},
		{image.Progress{Phase: image.PhaseFill, Done: 1 << 62, Total: 1 << 62}, 100},
	} {
		got, ok := percent(c.g)
		if ok != (c.want >= 0) || ok && got != c.want {
			t.Errorf("%+v: %d, %v; want %d", c.g, got, ok, c.want)
		}
	}
}

// A volume that was made before the node was killed is found, and its image is not pulled again.
func TestFilledBefore(t *testing.T) {
	n := prepare(t)
	team := vm.OnBehalf(t.Context(), vm.Owner{Namespace: "team"})
	labels := map[string]string{contract.KeyVolumeClaim: "uid-system"}
	v, err := n.store.Import(team, volume.Spec{Name: "pvc-uid-system", Size: 10 << 20, Labels: labels}, strings.NewReader("the disk"), nil)
	if err != nil {
		t.Fatal(err)
	}
	n.run()
	n.create(claim("system", "node-1", withImage("disk")))
	if pv := n.volume("system"); pv.Spec.CSI.VolumeHandle != string(v.ID) {
		t.Errorf("the volume is %+v", pv.Spec)
	}
}

func TestTwoContents(t *testing.T) {
	n := start(t)
	n.create(claim("both", "node-1", withImage("disk"), func(c *corev1.PersistentVolumeClaim) {
		c.Spec.DataSource = &corev1.TypedLocalObjectReference{Kind: "PersistentVolumeClaim", Name: "other"}
	}))
	n.told("remove one of them")
}

// Servers that send slowly do not keep a node from the claims of others.
func TestSlowImages(t *testing.T) {
	var f fills
	var ends []func()
	for _, namespace := range []string{"a", "b", "c"} {
		for range fillsPerNamespace {
			end, err := f.begin(namespace)
			if err != nil {
				t.Fatal(err)
			}
			ends = append(ends, end)
		}
		if _, err := f.begin(namespace); !errdefs.IsUnavailable(err) {
			t.Errorf("one too many of namespace %s: %v", namespace, err)
		}
	}
	if _, err := f.begin("d"); !errdefs.IsUnavailable(err) {
		t.Errorf("one too many: %v", err)
	}
	for _, end := range ends {
		end()
	}
	if f.all != 0 || len(f.count) != 0 {
		t.Errorf("left: %d, %v", f.all, f.count)
	}
}

// A claim whose disk is uploaded has no volume before the disk is there. Its namespace and its UID say where it is.
func TestUploadedDisk(t *testing.T) {
	n := prepare(t)
	var asked string
	n.uploads = func(namespace, claim, digest string) (image.PullRequest, error) {
		asked = namespace + " " + claim + " " + digest
		return image.PullRequest{Name: "uploaded"}, nil
	}
	n.images = func(_ context.Context, _ volume.Spec, from image.PullRequest) (io.Reader, error) {
		return strings.NewReader("disk " + from.Name), nil
	}
	n.run()
	c := claim("system", "node-1", func(c *corev1.PersistentVolumeClaim) { c.Annotations[contract.KeyUploadTarget] = "" })
	n.create(c)
	n.create(claim("other", "node-1"))
	n.volume("other") // the node has seen both claims
	if all := n.kept("team"); len(all) != 1 {
		t.Errorf("the node has %+v", all)
	}
	c.Annotations[contract.KeyVolumeUpload] = "sha256:1"
	if _, err := n.client.CoreV1().PersistentVolumeClaims("team").Update(t.Context(), c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := n.read(n.volume("system").Spec.CSI.VolumeHandle); got != "disk uploaded" {
		t.Errorf("on the volume is %q", got)
	}
	if asked != "team uid-system sha256:1" {
		t.Errorf("the node looked for %s", asked)
	}
	n.event("Filled the volume from what was uploaded")
	n.create(claim("both", "node-1", withImage("disk"), func(c *corev1.PersistentVolumeClaim) {
		c.Annotations[contract.KeyUploadTarget], c.Annotations[contract.KeyVolumeUpload] = "", "sha256:1"
	}))
	n.told("make a claim that asks for one of them")
}
