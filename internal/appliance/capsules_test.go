package appliance

import (
	"context"
	"testing"

	capsulev1 "cocoonstack.io/cocoon/api/capsule/v1"
)

// rolledBack is a machine whose last update was rolled back.
type rolledBack struct{ System }

func (rolledBack) Info(context.Context) (*capsulev1.GetInfoResponse, error) {
	return &capsulev1.GetInfoResponse{RolledBackBecause: "it hung", RolledBackLog: "a line of the log"}, nil
}

// Who may not read the log of the daemon does not read the end of it in what the machine says of itself.
func TestLogOfARollbackNeedsRights(t *testing.T) {
	s, ctx := serve(t, Deps{Volumes: &fullVolumes{}, System: rolledBack{}}), t.Context()
	for role, want := range map[capsulev1.Role]string{capsulev1.Role_ROLE_VIEW: "", capsulev1.Role_ROLE_OPERATE: "a line of the log", capsulev1.Role_ROLE_ADMIN: "a line of the log"} {
		info, err := capsulev1.NewCapsuleServiceClient(s.as(role)).GetInfo(ctx, &capsulev1.GetInfoRequest{})
		if err != nil {
			t.Fatal(err)
		}
		if info.GetRolledBackLog() != want || info.GetRolledBackBecause() != "it hung" {
			t.Errorf("%v learns %q, %q", role, info.GetRolledBackBecause(), info.GetRolledBackLog())
		}
	}
}
