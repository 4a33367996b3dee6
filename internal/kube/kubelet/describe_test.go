package kubelet

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/tools/remotecommand"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
	"cocoonstack.io/cocoon/internal/guest"
)

func (g *guests) Describe(_ context.Context, _, pod, container string) (guest.Description, error) {
	if pod != "web" {
		return guest.Description{}, errdefs.Unavailablef("no agent answers in the guest of %s", pod)
	}
	return guest.Description{Hostname: "web", Users: make([]guest.User, 10_000), Agent: container}, nil
}

func (g *guests) Freeze(_ context.Context, _, pod, _ string, most time.Duration) error {
	if pod != "web" || most != 30*time.Second {
		return errdefs.Unsupportedf("the guest of %s is not frozen for %s", pod, most)
	}
	return nil
}

func (g *guests) Thaw(_ context.Context, _, pod, _ string) (bool, error) { return pod == "web", nil }

func TestFreeze(t *testing.T) {
	n := serve(t)
	for _, c := range []struct{ value, want string }{
		{contract.GuestFreeze(30 * time.Second), "{}\n"},
		{contract.GuestThaw, "{\"held\":true}\n"},
	} {
		var out bytes.Buffer
		if err := n.ask(t, "web", contract.HeaderGuest, c.value, remotecommand.StreamOptions{Stdout: &out}); err != nil || out.String() != c.want {
			t.Errorf("%s: %v, %q", c.value, err, out.String())
		}
	}
	for value, code := range map[string]int{"freeze 0": http.StatusBadRequest, "freeze 301": http.StatusBadRequest, "freeze x": http.StatusBadRequest, "freeze": http.StatusBadRequest} {
		if err := n.ask(t, "web", contract.HeaderGuest, value, remotecommand.StreamOptions{Stdout: io.Discard}); err == nil || n.answered != code {
			t.Errorf("%s: %v, %d", value, err, n.answered)
		}
	}
}

func TestDescribe(t *testing.T) {
	n := serve(t)
	var out bytes.Buffer
	if err := n.ask(t, "web", contract.HeaderGuest, contract.GuestDescription, remotecommand.StreamOptions{Stdout: &out}); err != nil {
		t.Fatal(err)
	}
	if got := out.String(); !strings.Contains(got, `"hostname":"web"`) || strings.Count(got, `"name":""`) < 10_000 || !strings.HasSuffix(got, "}\n") {
		t.Errorf("%d bytes: %.200s", len(got), got)
	}
	one := remotecommand.StreamOptions{Stdout: io.Discard}
	both := remotecommand.StreamOptions{Stdin: strings.NewReader(""), Stdout: io.Discard}
	for _, c := range []struct {
		name, pod, value string
		o                remotecommand.StreamOptions
		code             int
		text             string
	}{
		{"no agent", "other", contract.GuestDescription, one, http.StatusServiceUnavailable, "no agent answers"},
		{"another word", "web", "secrets", one, http.StatusBadRequest, contract.HeaderGuest},
		{"input", "web", contract.GuestDescription, both, http.StatusBadRequest, "stdout alone"},
	} {
		err := n.ask(t, c.pod, contract.HeaderGuest, c.value, c.o)
		if err == nil || n.answered != c.code || !strings.Contains(err.Error(), c.text) {
			t.Errorf("%s: %d, %v, want %d and %q", c.name, n.answered, err, c.code, c.text)
		}
	}
}
