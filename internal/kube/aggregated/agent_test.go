package aggregated

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "kubevirt.io/api/core/v1"

	"cocoonstack.io/cocoon/internal/guest"
	"cocoonstack.io/cocoon/internal/testkit/diff"
)

func (g *fakeGuests) describe(ctx context.Context, pod types.NamespacedName) (guest.Description, error) {
	g.note("describe " + pod.String())
	if err := g.connect(ctx); err != nil {
		return guest.Description{}, err
	}
	return described, nil
}

func (g *fakeGuests) freeze(ctx context.Context, pod types.NamespacedName, most time.Duration) error {
	g.note(fmt.Sprintf("freeze %s %s", pod, most))
	return g.connect(ctx)
}

func (g *fakeGuests) thaw(ctx context.Context, pod types.NamespacedName) (bool, error) {
	g.note("thaw " + pod.String())
	return true, g.connect(ctx)
}

// Whoever freezes a guest says for how long, and the node is asked for no more than it grants.
func TestFreezeInstance(t *testing.T) {
	vmi := connected(instance("web", v1.Running))
	r := start(t, machine("Always"), vmi, podOf(vmi))
	at := prefix + "virtualmachineinstances/web/"
	for _, c := range []struct {
		sub, body string
		code      int
		asked     string
	}{
		{"freeze", `{"unfreezeTimeout": "30s"}`, http.StatusAccepted, "freeze default/virt-launcher-web 30s"},
		{"freeze", `{"unfreezeTimeout": "0s"}`, http.StatusAccepted, "freeze default/virt-launcher-web 5m0s"},
		{"freeze", "", http.StatusAccepted, "freeze default/virt-launcher-web 5m0s"},
		{"freeze", `{"unfreezeTimeout": "5m1s"}`, http.StatusBadRequest, ""},
		{"freeze", `{"unfreezeTimeout": "-1s"}`, http.StatusBadRequest, ""},
		{"freeze", `{"unfreezeTimeout": "soon"}`, http.StatusBadRequest, ""},
		{"unfreeze", "", http.StatusAccepted, "thaw default/virt-launcher-web"},
	} {
		before := r.guests.calls()
		code, body, _ := r.do(call{method: http.MethodPut, path: at + c.sub, body: c.body, cert: r.proxy})
		if asked := strings.Trim(strings.TrimPrefix(r.guests.calls(), before), " \n,;"); code != c.code || asked != c.asked {
			t.Errorf("%s %s: %d %s, asked %q", c.sub, c.body, code, body, asked)
		}
	}
	bare := instance("web", v1.Running)
	r = start(t, machine("Always"), bare, podOf(bare))
	if code, body, _ := r.do(call{method: http.MethodPut, path: at + "freeze", cert: r.proxy}); code != http.StatusConflict || !strings.Contains(body, "guest agent") {
		t.Errorf("without an agent: %d %s", code, body)
	}
}

var described = guest.Description{
	Agent: "7.2", Hostname: "web", OS: guest.OS{ID: "debian", Name: "Debian GNU/Linux", PrettyName: "Debian 12", Version: "12 (bookworm)", VersionID: "12", KernelRelease: "6.1.0", KernelVersion: "#1", Machine: "x86_64"},
	Timezone: guest.Timezone{Name: "CET", Offset: 3600}, Users: []guest.User{{Name: "ada", Since: time.UnixMicro(1764180000250000)}},
	FileSystems: []guest.FileSystem{{Device: "vda1", Path: "/", Type: "ext4", Total: 20, Used: 10, Disks: []guest.FileSystemDisk{{Serial: "cocoon-disk", Bus: "virtio"}}}},
}

// connected says that an agent answers in the guest of vmi.
func connected(vmi *v1.VirtualMachineInstance) *v1.VirtualMachineInstance {
	vmi.Status.Conditions = append(vmi.Status.Conditions, v1.VirtualMachineInstanceCondition{Type: v1.VirtualMachineInstanceAgentConnected, Status: corev1.ConditionTrue})
	return vmi
}

// compact is text without what JSON does not need.
func compact(t *testing.T, text string) string {
	t.Helper()
	var v any
	if err := json.Unmarshal([]byte(text), &v); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	b, _ := json.Marshal(v)
	return string(b)
}

func TestGuestInfo(t *testing.T) {
	vmi := connected(instance("web", v1.Running))
	r := start(t, machine("Always"), vmi, podOf(vmi))
	const users = `[{"userName": "ada", "loginTime": 1764180000.25}]`
	const disks = `[{"diskName": "vda1", "mountPoint": "/", "fileSystemType": "ext4", "usedBytes": 10, "totalBytes": 20, "disk": [{"serial": "cocoon-disk", "busType": "virtio"}]}]`
	for sub, want := range map[string]string{
		"guestosinfo": `{"kind": "VirtualMachineInstanceGuestAgentInfo", "apiVersion": "subresources.kubevirt.io/v1", "guestAgentVersion": "7.2", "hostname": "web", "timezone": "CET, 3600",
			"os": {"name": "Debian GNU/Linux", "kernelRelease": "6.1.0", "version": "12 (bookworm)", "prettyName": "Debian 12", "versionId": "12", "kernelVersion": "#1", "machine": "x86_64", "id": "debian"},
			"userList": ` + users + `, "fsInfo": {"disks": ` + disks + `}}`,
		"userlist":       `{"kind": "VirtualMachineInstanceGuestOSUserList", "apiVersion": "subresources.kubevirt.io/v1", "metadata": {}, "items": ` + users + `}`,
		"filesystemlist": `{"kind": "VirtualMachineInstanceFileSystemList", "apiVersion": "subresources.kubevirt.io/v1", "metadata": {}, "items": ` + disks + `}`,
	} {
		code, body, header := r.do(call{method: http.MethodGet, path: prefix + "virtualmachineinstances/web/" + sub, cert: r.proxy})
		if code != http.StatusOK || header.Get("Content-Type") != "application/json" {
			t.Errorf("%s: %d %v %s", sub, code, header, body)
			continue
		}
		if d := diff.Of(compact(t, want), compact(t, body)); d != "" {
			t.Errorf("%s: %s", sub, d)
		}
	}
	if got := r.guests.calls(); strings.Count(got, "describe default/virt-launcher-web") != 3 {
		t.Errorf("asked %s", got)
	}
}

func TestGuestInfoRefused(t *testing.T) {
	away := &apierrors.StatusError{ErrStatus: metav1.Status{Status: metav1.StatusFailure, Code: http.StatusServiceUnavailable, Reason: metav1.StatusReasonServiceUnavailable, Message: "the guest does not answer"}}
	for name, c := range map[string]struct {
		change func(vmi *v1.VirtualMachineInstance, pod *corev1.Pod)
		fails  error
		want   string
	}{
		"no agent":       {func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) { vmi.Status.Conditions = nil }, nil, "409 VMI does not have guest agent connected"},
		"scheduled":      {func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) { vmi.Status.Phase = v1.Scheduled }, nil, "409 VMI is not running"},
		"pod pending":    {func(_ *v1.VirtualMachineInstance, pod *corev1.Pod) { pod.Status.Phase = corev1.PodPending }, nil, "409 VMI is not running"},
		"pod of another": {func(_ *v1.VirtualMachineInstance, pod *corev1.Pod) { pod.OwnerReferences[0].UID = "other" }, nil, "409 VMI is not running"},
		"paused": {func(vmi *v1.VirtualMachineInstance, _ *corev1.Pod) {
			vmi.Status.Conditions = append(vmi.Status.Conditions, v1.VirtualMachineInstanceCondition{Type: v1.VirtualMachineInstancePaused, Status: corev1.ConditionTrue})
		}, nil, "409 VMI is paused"},
		"silent": {func(*v1.VirtualMachineInstance, *corev1.Pod) {}, away, "503 the guest does not answer"},
	} {
		vmi := connected(instance("web", v1.Running))
		pod := podOf(vmi)
		c.change(vmi, pod)
		r := start(t, machine("Always"), vmi, pod)
		r.guests.fails = c.fails
		code, body, _ := r.do(call{method: http.MethodGet, path: prefix + "virtualmachineinstances/web/guestosinfo", cert: r.proxy})
		status, text, _ := strings.Cut(c.want, " ")
		if strconv.Itoa(code) != status || !strings.Contains(message(body), text) {
			t.Errorf("%s: %d %s, want %s", name, code, message(body), c.want)
		}
		if c.fails == nil && r.guests.calls() != "" {
			t.Errorf("%s: the guest was asked", name)
		}
	}
}
