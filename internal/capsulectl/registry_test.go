package capsulectl_test

import (
	"context"
	"strings"
	"testing"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
	"cocoonstack.io/cocoon/internal/errdefs"
)

func (s *imageServer) RegistryLogin(_ context.Context, r *capsulev1.RegistryLoginRequest) (*capsulev1.RegistryLoginResponse, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls = append(s.calls, "login "+r.GetRegistry()+" "+r.GetUsername()+" "+r.GetPassword())
	return &capsulev1.RegistryLoginResponse{}, nil
}

func (*imageServer) RegistryList(context.Context, *capsulev1.RegistryListRequest) (*capsulev1.RegistryListResponse, error) {
	return &capsulev1.RegistryListResponse{Registries: []*capsulev1.RegistryLoginInfo{{Registry: "r.example", Username: "ann"}}}, nil
}

func (*imageServer) RegistryLogout(_ context.Context, r *capsulev1.RegistryLogoutRequest) (*capsulev1.RegistryLogoutResponse, error) {
	if r.GetRegistry() != "r.example" {
		return nil, errdefs.NotFoundf("there are no credentials for registry %s", r.GetRegistry())
	}
	return &capsulev1.RegistryLogoutResponse{}, nil
}

// The password comes from standard input, and is not shown.
func TestRegistry(t *testing.T) {
	m := newMachine(t)
	o := adopted(t, m)
	for _, in := range []string{"s3cret: x\n", "s3cret: x\r\nmore", "s3cret: x"} {
		m.calls, o.stdin = nil, in
		if out := o.ok("registry", "login", "r.example", "--username", "ann"); strings.Contains(out, "s3cret") {
			t.Error(out)
		}
		if len(m.calls) != 1 || m.calls[0] != "login r.example ann s3cret: x" {
			t.Errorf("%q", m.calls)
		}
	}
	o.stdin = "\n"
	o.fails(2, "no secret", "registry", "login", "r.example", "--username", "ann")
	o.fails(2, "username", "registry", "login", "r.example")
	o.fails(2, "", "registry", "login", "r.example", "--username", "ann", "s3cret")
	has(t, o.ok("registry", "list"), "r.example", "ann")
	o.ok("registry", "logout", "r.example")
	o.fails(3, "no credentials", "registry", "logout", "other.example")
}
