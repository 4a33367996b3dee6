package kubelet

import (
	"context"
	"encoding/json"
	"net/http"
	"time"

	"cocoonstack.io/cocoon/api/contract"
	"cocoonstack.io/cocoon/internal/errdefs"
)

// describeLimit is how long a guest may take to tell of itself.
const describeLimit = 20 * time.Second

// describe sends what a guest tells of itself, as JSON. As with a screen, an error comes before the connection is upgraded.
func (s *Server) describe(w http.ResponseWriter, r *http.Request, what string) {
	want, err := parseWishes(r)
	switch {
	case err != nil:
	case what != contract.GuestDescription:
		err = errdefs.Invalidf("header %s must be %s", contract.HeaderGuest, contract.GuestDescription)
	case want.tty || want.stderr || !want.stdout || want.stdin:
		err = errdefs.Invalidf("the description of a guest needs stdout alone")
	}
	if err != nil {
		s.refuse(w, err)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), describeLimit)
	defer cancel()
	d, err := s.cfg.Backend.Describe(ctx, r.PathValue("namespace"), r.PathValue("pod"), r.PathValue("container"))
	if err != nil {
		s.refuse(w, err)
		return
	}
	s.session(w, r, want, "describing the guest of", func(_ context.Context, se *session) (int, error) {
		return 0, json.NewEncoder(se.stdout).Encode(d)
	})
}
